from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.pipelines.elements.arrow_fields import Conversion
from raydist.pipelines.elements.arrow_rows import RowSchema
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError
from tests.pipelines.elements.random_tables import alike, original, random_table

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
    assert RowSchema(schema).null_rows(batch).keys() == {number for number, row in enumerate(rows) if has_null(row)}


def test_numbers_are_not_copied_and_not_writable() -> None:
    batch = pa.RecordBatch.from_pydict({"x": [1, 2], "t": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))})
    block, nulls = RowSchema(batch.schema).block(batch)
    assert not nulls
    assert [column.flags.writeable for column in block.columns] == [False, False]
    assert [column.ctypes.data for column in block.columns] == [
        batch.column("t").flatten().buffers()[1].address,
        batch.column("x").buffers()[1].address,
    ]


def test_fill_values() -> None:
    columns = {
        "n": pa.array([1, None], pa.uint8()),
        "x": pa.array([0.5, None], pa.float32()),
        "s": pa.array(["a", None]),
        "l": pa.array([[1, None], None], pa.list_(pa.int16())),
        "f": pa.array([[1, None], None], pa.list_(pa.int16(), 2)),
        "st": pa.array([{"a": 1, "b": None}, None], pa.struct({"a": pa.int8(), "b": pa.string()})),
        "m": pa.array([[("k", None)], None], pa.map_(pa.string(), pa.int8())),
        "d": pa.array([datetime.date(2020, 1, 2), None]),
        "dec": pa.array([decimal.Decimal("0.10"), None]),
        "none": pa.nulls(2),
    }
    table = pa.table(columns)
    one = list(rd.Dataset.from_arrow(table.select(["n", "x", "l", "f", "m", "dec"]), fill_null=7).as_numpy_iterator())
    assert [(row["n"], row["x"], row["dec"]) for row in one] == [(1, 0.5, 0.1), (7, 7.0, 7.0)]
    assert [row["l"].tolist() for row in one] == [[1, 7], []]
    assert [row["f"].tolist() for row in one] == [[1, 7], [7, 7]]
    assert [row["m"]["values"].tolist() for row in one] == [[7], []]
    values = {
        **{"n": 0, "x": float("nan"), "s": "?", "l": [8, 9], "f": (3, 4), "st": {"a": -1, "b": ""}},
        **{"m": {"z": 5}, "d": "1970-01-03", "dec": decimal.Decimal("1.25"), "none": "nothing"},
    }
    with pytest.raises(rd.SpecError, match=r"column 'l' has one in row 0\. Give fill_null=.*null_masks=True"):
        rd.Dataset.from_arrow(table, fill_null=values, decimals="text")  # of [1, None] the list has a value
    first = pa.table({**columns, "l": pa.array([[1], None], pa.list_(pa.int16()))})
    first = first.set_column(4, "f", pa.array([[1, 2], None], pa.list_(pa.int16(), 2)))
    first = first.set_column(6, "m", pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int8())))
    row = list(rd.Dataset.from_arrow(first, fill_null=values, decimals="text").as_numpy_iterator())[1]
    assert np.isnan(row.pop("x"))
    assert {
        key: value.tolist() if isinstance(value, np.ndarray | np.generic) else value for key, value in row.items()
    } == {
        **{"n": 0, "s": "?", "l": [8, 9], "f": [3, 4], "st": {"a": -1, "b": ""}},
        **{"m": row["m"], "d": datetime.date(1970, 1, 3), "dec": "1.25", "none": "nothing"},
    }
    assert (row["m"]["keys"].tolist(), row["m"]["values"].tolist()) == (["z"], [5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"fill_null": {"x": "text"}},
            "A fill value must be one of its column, got 'text' for column 'x' of type int8",
        ),
        ({"fill_null": {"x": 0.5}}, "got 0.5 for column 'x'"),
        ({"fill_null": {"x": True}}, "got True for column 'x'"),
        ({"fill_null": {"x": 1000}}, "got 1000 for column 'x'"),
        ({"fill_null": {"s": ""}}, "A fill value must be one of its column, got '' for column 's'"),
        ({"fill_null": {"s": {"b": 1}}}, r"fill_null must name fields of column 's' \(a\), got 'b'"),
        ({"fill_null": {"y": 0}}, r"fill_null must name columns that are read \(x, s\), got 'y'"),
        ({"fill_null": datetime.date.min}, "fill_null must be a value of one of the columns"),
        ({"null_masks": ["y"]}, r"null_masks must name columns that are read \(x, s\), got 'y'"),
        ({"null_masks": "x"}, "null_masks must be True, False or a list of columns, got 'x'"),
        ({"decimals": "float32"}, 'decimals must be "float64" or "text", got \'float32\''),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    table = pa.table({"x": pa.array([1], pa.int8()), "s": pa.array([{"a": 1}])})
    with pytest.raises(rd.InvalidArgumentError, match=message):
        rd.Dataset.from_arrow(table, **arguments)


def test_masks_of_some_columns() -> None:
    schema = pa.schema(
        [
            pa.field("x", pa.int8()),
            pa.field("sure", pa.int8(), nullable=False),
            pa.field("s", pa.struct([pa.field("a", pa.int8(), nullable=False)])),
            pa.field("t", pa.timestamp("s")),
        ]
    )
    rows = [{"x": 1, "sure": 2, "s": {"a": 3}, "t": 4}, {"x": None, "sure": 5, "s": None, "t": None}]
    block, nulls = RowSchema(schema, Conversion(null_masks=True)).block(pa.RecordBatch.from_pylist(rows, schema=schema))
    assert not nulls
    first, second = block.rows()
    assert [*first] == ["x", "x_is_null", "sure", "s", "s_is_null", "t", "t_is_null"]
    assert second["s"] == {"a": 0}
    assert [bool(second[name]) for name in ("x_is_null", "s_is_null", "t_is_null")] == [True] * 3
    assert np.isnat(second["t"])
    some = RowSchema(schema, Conversion(null_masks=("x", "s")))
    assert [*some.spec] == ["x", "x_is_null", "sure", "s", "s_is_null", "t"]
    assert some.null_rows(pa.RecordBatch.from_pylist(rows, schema=schema)) == {1: "t"}
    with pytest.raises(rd.SpecError, match="must have different names, got two of the name 'x_is_null'"):
        RowSchema(pa.schema({"x": pa.int8(), "x_is_null": pa.bool_()}), Conversion(null_masks=True))


@pytest.mark.parametrize("seed", range(25))
def test_elements_are_the_rows_of_arrow(seed: int, tmp_path: Path) -> None:
    """All 200 of these once: `range(200)`. Bar W5."""
    decimals = "text" if seed % 2 else "float64"
    for ipc in (False, True):
        table, path = random_table(seed, ipc=ipc), str(tmp_path / f"{ipc}")
        if ipc:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
            sources = [rd.Dataset.from_arrow(source, null_masks=True, decimals=decimals) for source in (table, path)]
        else:
            pq.write_table(table, path, row_group_size=4)
            table = pq.read_table(path)
            sources = [rd.Dataset.from_parquet(path, null_masks=True, decimals=decimals)]
        for dataset in sources:
            rows = [original(row, table.schema) for row in dataset.as_numpy_iterator()]
            assert len(rows) == table.num_rows
            assert all(map(alike, rows, table.to_pylist()))
