from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raydist as rd
from raydist.pipelines.elements.arrow_types import is_text, read_names, spec_of_schema


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (pa.uint16(), rd.TensorSpec((), "uint16")),
        (pa.float16(), rd.TensorSpec((), "float16")),
        (pa.bool_(), rd.TensorSpec((), "bool")),
        (pa.large_string(), rd.TensorSpec((), str)),
        (pa.string_view(), rd.TensorSpec((), str)),
        (pa.binary(4), rd.TensorSpec((), bytes)),
        (pa.dictionary(pa.int8(), pa.string()), rd.TensorSpec((), str)),
        (pa.list_(pa.float32()), rd.TensorSpec((None,), "float32")),
        (pa.large_list(pa.list_(pa.int8(), 3)), rd.TensorSpec((None, 3), "int8")),
        (pa.list_(pa.list_(pa.string(), 2), 3), rd.TensorSpec((3, 2), str)),
        (pa.fixed_shape_tensor(pa.int32(), (2, 0)), rd.TensorSpec((2, 0), "int32")),
        (pa.struct({"b": pa.int8(), "a": pa.string()}), {"b": rd.TensorSpec((), np.int8), "a": rd.TensorSpec((), str)}),
    ],
)
def test_types(kind: pa.DataType, spec: Any) -> None:
    assert spec_of_schema(pa.schema({"x": kind})) == {"x": spec}
    assert is_text(kind) == (kind in (pa.large_string(), pa.string_view(), pa.binary(4)))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"t": pa.timestamp("s")}, r"Column 't' must hold numbers.* got timestamp\[s\]"),
        ({"s": pa.struct({"d": pa.date32()})}, r"Column 's.d' .* got date32"),
        ({"l": pa.list_(pa.list_(pa.int8()))}, "A list in column 'l' must hold values of one shape"),
        ({"l": pa.list_(pa.struct({"a": pa.int8()}))}, "A list in column 'l' must hold values of one shape"),
        ({"x": pa.null()}, "Column 'x' .* got null"),
        ({"x": pa.fixed_shape_tensor(pa.int8(), (2, 3), permutation=[1, 0])}, "Column 'x' .*fixed_shape_tensor"),
        ([("x", pa.int8()), ("x", pa.int8())], "got two of the name 'x'"),
        ([], "at least one column, got none"),
    ],
)
def test_types_that_are_no_leaves(schema: Any, message: str) -> None:
    with pytest.raises(rd.SpecError, match=message):
        spec_of_schema(pa.schema(schema))


def test_names_that_are_no_text() -> None:
    read_names(pa.schema({"a": pa.struct({"b": pa.int8()})}))
    schema = pa.schema([pa.field("name", pa.struct([pa.field("inner", pa.int8())]))])
    damaged = pa.ipc.read_schema(pa.py_buffer(schema.serialize().to_pybytes().replace(b"inner", b"\xff\xffner")))
    with pytest.raises(UnicodeDecodeError):
        read_names(damaged)
