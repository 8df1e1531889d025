from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from raydist.errors import SpecError
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.sources.signature import Signature


class Pair(NamedTuple):
    image: Any
    label: Any


def fit(spec: TensorSpec, value: Any) -> Any:
    (leaf,) = Signature.parse(spec).leaves(value)
    return leaf


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("int64", 3, 3),
        ("uint8", 255, 255),
        ("int32", np.int64(-5), -5),
        ("float32", 3, 3.0),
        ("float64", 0.1, 0.1),  # not through float32
        ("float32", np.float64(0.5), 0.5),
        ("float32", torch.tensor(0.5), 0.5),
        ("bool", True, True),
        ("int64", np.True_, 1),
        ("complex64", 1.5, 1.5 + 0j),
        (bytes, b"a\0", b"a\0"),
        (str, "ä", "ä"),
        ("torch.int64", 1, 1),
    ],
)
def test_scalars_become_the_declared_dtype(dtype: Any, value: Any, expected: Any) -> None:
    spec = TensorSpec((), dtype)
    leaf = fit(spec, value)
    assert leaf == expected
    assert isinstance(leaf, bytes | str) or leaf.dtype == spec.dtype


@pytest.mark.parametrize(
    ("dtype", "value", "shown"),
    [
        ("int64", 1.0, "float32"),
        ("int64", "1", "str"),
        ("uint8", 256, "int64"),
        ("uint8", -1, "int64"),
        ("int64", 2**63, "A Python int must fit into int64"),
        ("bool", 1, "int64"),
        ("float32", b"x", "bytes"),
        ("float32", 1j, "complex128"),
        (bytes, "text", "str"),
        (str, b"bytes", "bytes"),
        (bytes, 3, "int64"),
        (str, ["a", 1], "must hold one type"),
        ("int64", [1, "a"], "must hold one type"),
        ("int64", [[1], [1, 2]], "must be rectangular"),
        ("int64", object(), "of type builtins.object"),
        ("int64", None, "of type builtins.NoneType"),
    ],
)
def test_another_dtype_is_shown(dtype: Any, value: Any, shown: str) -> None:
    spec = TensorSpec(None, dtype)
    with pytest.raises(SpecError) as caught:
        fit(spec, value)
    assert f"must yield {spec}, as its output_signature says, got " in str(caught.value)
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "value"),
    [((2,), [1, 2]), ((None,), [1, 2, 3]), (None, 5), (None, [[1]]), ((None, 2), np.zeros((0, 2), int)), ((0,), [])],
)
def test_shapes_that_fit(shape: Any, value: Any) -> None:
    assert fit(TensorSpec(shape, "int64"), value).tolist() == np.asarray(value).tolist()


@pytest.mark.parametrize(("shape", "value"), [((), [1]), ((2,), 1), ((2,), [1, 2, 3]), ((None,), [[1]]), ((0,), [1])])
def test_another_shape_is_shown(shape: Any, value: Any) -> None:
    spec, got = TensorSpec(shape, "int64"), TensorSpec(np.shape(value), "int64")
    with pytest.raises(SpecError) as caught:
        fit(spec, value)
    assert f"must yield {spec}, as its output_signature says, got {got}" in str(caught.value)


def test_the_structure_is_that_of_the_signature() -> None:
    spec = TensorSpec((), "int64")
    signature = Signature.parse({"a": spec, "b": (spec, spec)})
    assert [int(leaf) for leaf in signature.leaves({"b": (2, 3), "a": 1})] == [1, 2, 3]
    assert signature.nest() == {"a": spec, "b": (spec, spec)}
    for value in (1, (1, 2), {"a": 1}, {"a": 1, "b": [2, 3]}, {"a": 1, "b": (2, 3), "c": 4}):
        with pytest.raises(SpecError, match="must yield (elements of the structure|.*at 'b)"):
            signature.leaves(value)
    assert len(Signature.parse(Pair(spec, spec)).leaves(Pair(1, 2))) == 2


def test_the_leaf_at_fault_is_named() -> None:
    spec = TensorSpec((), "int64")
    with pytest.raises(SpecError, match="must yield .* at 'b.1', as its"):
        Signature.parse({"a": spec, "b": (spec, spec)}).leaves({"a": 1, "b": (2, "x")})


@pytest.mark.parametrize("signature", ["int64", (TensorSpec(), 3), {}, ()])
def test_a_signature_holds_specs(signature: Any) -> None:
    with pytest.raises(SpecError, match="output_signature must"):
        Signature.parse(signature)


def test_leaves_are_copies() -> None:
    for buffer in (np.zeros(2), np.array([b"x"], dtype=object)):
        spec = TensorSpec((None,), buffer.dtype if buffer.dtype != object else bytes)
        leaf = fit(spec, buffer)
        buffer[0] = b"y" if buffer.dtype == object else 1
        assert leaf[0] in (0, b"x")


def test_columns_are_dense_where_shapes_agree() -> None:
    signature = Signature.parse((TensorSpec((None,), "float32"), TensorSpec((), bytes), TensorSpec((None,), str)))
    same = signature.block([signature.leaves(([1.0], b"a", ["x"])), signature.leaves(([2.0], b"b", ["y"]))])
    assert [column.dtype for column in same.columns] == [np.dtype(np.float32), np.dtype(object), np.dtype(object)]
    assert [column.shape for column in same.columns] == [(2, 1), (2,), (2, 1)]
    ragged = signature.block([signature.leaves(([1.0], b"a", [])), signature.leaves(([], b"b", ["y"]))])
    assert [column.shape for column in ragged.columns] == [(2,), (2,), (2,)]
    assert [row.dtype for row in ragged.columns[0]] == [np.dtype(np.float32)] * 2
    assert ragged.specs == signature.specs


def test_a_tuple_for_one_tensor_gets_advice() -> None:
    advice = "A tuple is a structure: yield a list for one tensor"
    spec = TensorSpec((2,), "int64")
    with pytest.raises(SpecError, match=advice):
        Signature.parse(spec).leaves((1, 2))
    with pytest.raises(SpecError, match=advice):
        Signature.parse((spec, spec)).leaves(([1, 2], (1, 2)))
    with pytest.raises(SpecError) as caught:
        Signature.parse((spec, spec)).leaves(([1, 2],))
    assert advice not in str(caught.value)
    assert Signature.parse(spec).leaves([1, 2])[0].tolist() == [1, 2]


def test_rows_of_any_rank_have_the_shape_that_they_have() -> None:
    signature = Signature.parse((TensorSpec(None, "int64"), TensorSpec(None, bytes)))
    one = signature.block([signature.leaves(([1, 2], b"a")), signature.leaves(([3, 4], b"b"))])
    assert one.specs == (TensorSpec((2,), "int64"), TensorSpec((), bytes))
    other = signature.block([signature.leaves(([1, 2], b"a")), signature.leaves((3, b"b"))])
    assert other.specs[0] == TensorSpec(None, "int64")
