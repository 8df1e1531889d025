from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.pipelines.elements.arrow_rows import RowSchema, null_rows
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError

KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "number": (pa.int16(), st.integers(-9, 9)),
    "flag": (pa.bool_(), st.booleans()),
    "text": (pa.string(), st.text(max_size=3)),
    "binary": (pa.large_binary(), st.binary(max_size=3)),
    "list": (pa.list_(pa.float64()), st.lists(st.just(0.5) | st.none(), max_size=3)),
    "pair": (pa.list_(pa.int8(), 2), st.lists(st.integers(0, 9) | st.none(), min_size=2, max_size=2)),
    "word": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from("ab")),
    "pairs": (pa.large_list(pa.list_(pa.string(), 1)), st.lists(st.lists(st.text(max_size=1), min_size=1, max_size=1))),
    "struct": (pa.struct({"b": pa.int8(), "a": pa.list_(pa.bool_())}), st.just({"b": 1, "a": [True, None]})),
}
ROWS = st.lists(st.fixed_dictionaries({name: values | st.none() for name, (_, values) in KINDS.items()}), max_size=5)


def has_null(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(has_null, value.values() if isinstance(value, dict) else value))
    return value is None


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return value if isinstance(value, str | bytes) else value.tolist()


@given(rows=ROWS, cut=st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_rows_and_nulls(rows: list[dict[str, Any]], cut: tuple[int, int]) -> None:
    schema = pa.schema({name: kind for name, (kind, _) in KINDS.items()})
    batch = pa.RecordBatch.from_pylist(rows, schema=schema).slice(*cut)
    rows = rows[cut[0] : sum(cut)]
    items = RowSchema(schema).items(batch, lambda row, column: rd.DataLossError(f"{row} {column}"))
    found: list[Any] = []
    for item in items:
        found += map(plain, item.rows()) if isinstance(item, Block) else [item]
    assert len(found) == len(rows)
    for number, (mine, row) in enumerate(zip(found, rows, strict=True)):
        if has_null(row):
            assert isinstance(mine, ElementError)
            index, column = str(mine.error).split()
            assert int(index) == number
            assert has_null(row[column])
        else:
            assert mine == row
    assert null_rows(batch).keys() == {number for number, row in enumerate(rows) if has_null(row)}


def test_numbers_are_not_copied_and_not_writable() -> None:
    batch = pa.RecordBatch.from_pydict({"x": [1, 2], "t": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))})
    block = RowSchema(batch.schema).block(batch)
    assert [column.flags.writeable for column in block.columns] == [False, False]
    assert [column.ctypes.data for column in block.columns] == [
        batch.column("t").flatten().buffers()[1].address,
        batch.column("x").buffers()[1].address,
    ]


def test_a_schema_that_no_element_can_have() -> None:
    with pytest.raises(rd.SpecError, match="got date32"):
        RowSchema(pa.schema({"x": pa.date32()}))
