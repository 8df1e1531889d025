from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raydist as rd
from raydist.pipelines.elements.arrow_rows import RowSchema
from raydist.pipelines.elements.arrow_types import read_names


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
        (pa.date32(), rd.TensorSpec((), "datetime64[D]")),
        (pa.timestamp("us", "Europe/Berlin"), rd.TensorSpec((), "datetime64[us]")),
        (pa.list_(pa.time32("ms")), rd.TensorSpec((None,), "timedelta64[ms]")),
        (pa.decimal128(5, 2), rd.TensorSpec((), "float64")),
        (
            pa.list_(pa.struct({"a": pa.int8(), "b": pa.list_(pa.bool_())})),
            {
                "a": rd.TensorSpec((None,), np.int8),
                "b": {"values": rd.TensorSpec((None,), bool), "lengths": rd.TensorSpec((None,), np.int64)},
            },
        ),
        (
            pa.list_(pa.list_(pa.int8()), 3),
            {"values": rd.TensorSpec((None,), np.int8), "lengths": rd.TensorSpec((3,), np.int64)},
        ),
        (
            pa.map_(pa.string(), pa.int8()),
            {"keys": rd.TensorSpec((None,), str), "values": rd.TensorSpec((None,), np.int8)},
        ),
        (pa.list_(pa.null()), rd.TensorSpec((None,), "float32")),
        (pa.uuid(), rd.TensorSpec((), bytes)),
        (pa.run_end_encoded(pa.int32(), pa.bool8()), rd.TensorSpec((), "int8")),
        (pa.struct({"b": pa.int8(), "a": pa.string()}), {"b": rd.TensorSpec((), np.int8), "a": rd.TensorSpec((), str)}),
    ],
)
def test_types(kind: pa.DataType, spec: Any) -> None:
    assert RowSchema(pa.schema({"x": kind})).spec == {"x": spec}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"s": pa.struct({"d": pa.month_day_nano_interval()})}, r"Column 's.d' .* got month_day_nano_interval"),
        ({"l": pa.list_(pa.dense_union([pa.field("a", pa.int8())]))}, "Column 'l' .* got dense_union"),
        ({"x": pa.null()}, r"Column 'x' must hold values, got nulls only. Fill them .*fill_null="),
        ({"x": pa.fixed_shape_tensor(pa.int8(), (2, 3), permutation=[1, 0])}, "Column 'x' .*fixed_shape_tensor"),
        ([("x", pa.int8()), ("x", pa.int8())], "got two of the name 'x'"),
        ([], "at least one column, got none"),
    ],
)
def test_types_that_are_no_leaves(schema: Any, message: str) -> None:
    with pytest.raises(rd.SpecError, match=message):
        RowSchema(pa.schema(schema))


def test_names_that_are_no_text() -> None:
    read_names(pa.schema({"a": pa.struct({"b": pa.int8()})}))
    schema = pa.schema([pa.field("name", pa.struct([pa.field("inner", pa.int8())]))])
    damaged = pa.ipc.read_schema(pa.py_buffer(schema.serialize().to_pybytes().replace(b"inner", b"\xff\xffner")))
    with pytest.raises(UnicodeDecodeError):
        read_names(damaged)
