from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec


def test_from_tensors_of_torch_is_one_element() -> None:
    dataset = Dataset.from_tensors((torch.ones(2), {"a": [1, 2, 3]}, "text"))
    assert dataset.cardinality() == 1
    assert dataset.element_spec == (TensorSpec((2,)), {"a": TensorSpec((3,), "int64")}, TensorSpec((), "U"))


@pytest.mark.parametrize(
    ("types", "shapes", "spec"),
    [
        ("int64", (), TensorSpec((), "int64")),
        (torch.int64, None, TensorSpec(None, "int64")),
        (np.int64, torch.Size([]), TensorSpec((), "int64")),
    ],
)
def test_a_generator_described_by_types_and_shapes(types: Any, shapes: Any, spec: TensorSpec) -> None:
    ds = Dataset.from_generator(range, args=[3], output_types=types, output_shapes=shapes)
    assert ds.element_spec == spec
    assert [x.tolist() for x in ds.batch(2)] == [[0, 1], [2]]


def test_types_and_shapes_are_nests() -> None:
    def pairs() -> Any:
        yield {"x": [1.0, 2.0], "y": (1, "a")}
        yield {"x": [3.0], "y": (2, "b")}

    types = {"x": "float32", "y": ("int32", str)}
    ds = Dataset.from_generator(pairs, output_types=types, output_shapes={"x": (None,), "y": ((), ())})
    assert ds.element_spec == {"x": TensorSpec((None,)), "y": (TensorSpec((), "int32"), TensorSpec((), "U"))}
    assert [len(element["x"]) for element in ds] == [2, 1]
    unknown = Dataset.from_generator(pairs, output_types=types)
    assert unknown.element_spec["x"] == TensorSpec(None)
    assert [x.shape for x in unknown.map(lambda e: e["x"]).padded_batch(2)] == [(2, 2)]


def test_types_and_shapes_that_do_not_fit() -> None:
    spec = TensorSpec((), "int64")
    with pytest.raises(InvalidArgumentError, match="output_signature, or output_types with output_shapes, got both"):
        Dataset.from_generator(range, spec, output_types="int64")
    with pytest.raises(InvalidArgumentError, match=r"output_shapes must be a nest like the element, \('\*', '\*'\)"):
        Dataset.from_generator(range, output_types=("int64", "int64"), output_shapes=((),))
    with pytest.raises(InvalidArgumentError, match="output_types must be a nest of dtypes.* got 'words'"):
        Dataset.from_generator(range, output_types="words")
    with pytest.raises(InvalidArgumentError, match="got 'int64' and 3"):
        Dataset.from_generator(range, output_types="int64", output_shapes=3)
    with pytest.raises(SpecError, match=r"nest of rd.TensorSpec, got a leaf torch.int64. Dtypes alone: output_types="):
        Dataset.from_generator(range, torch.int64)
    with pytest.raises(SpecError, match="needs output_signature"):
        Dataset.from_generator(range, output_shapes=())
