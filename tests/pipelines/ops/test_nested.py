from __future__ import annotations

import numpy as np
import pytest

from raydist.core.errors import FailedPreconditionError, SpecError
from raydist.dataset import Dataset
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.ops.nested import call_on_element, graph_of


def test_a_tuple_is_unpacked_into_arguments() -> None:
    block = block_of_rows([(1, "a"), (2, "b")])
    assert call_on_element(lambda number, text: f"{number}{text}", block, 1) == "2b"
    assert call_on_element(lambda element: element["x"] + 1, block_of_rows([{"x": 4}]), 0) == 5


@pytest.mark.parametrize("value", [None, 3, [1, 2]])
def test_only_a_dataset_has_a_graph(value: object) -> None:
    with pytest.raises(SpecError, match="of flat_map-1 must return a Dataset, got"):
        graph_of(value, "flat_map-1")


def test_the_spec_is_that_of_the_first_dataset_that_can_tell() -> None:
    dataset = Dataset.range(4).flat_map(lambda n: Dataset.range(n).map(lambda x: x * 0.5))
    assert dataset.element_spec == TensorSpec((), "float64")


def test_no_dataset_can_tell() -> None:
    dataset = Dataset.range(3).flat_map(lambda n: Dataset.range(0).map(lambda x: x))
    with pytest.raises(FailedPreconditionError, match="gave no dataset with a first element"):
        _ = dataset.element_spec


def test_dimensions_in_which_the_first_datasets_differ_are_none() -> None:
    dataset = Dataset.range(5).flat_map(lambda n: Dataset.from_tensors(np.zeros((2, n))))
    assert dataset.element_spec == TensorSpec((2, None), "float64")
    assert [x.shape for x in dataset] == [(2, n) for n in range(5)]
