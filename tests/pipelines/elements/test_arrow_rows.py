"""Rows of Arrow tables as elements, against pyarrow's own conversion."""

from __future__ import annotations

import datetime
import decimal
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raydist as rd
from raydist.pipelines.elements.arrow_fields import Conversion
from raydist.pipelines.elements.arrow_rows import RowSchema
from raydist.pipelines.elements.arrow_types import read_names
from tests.contracts.op import collect, is_error, iterate, same

LEAVES: dict[pa.DataType, rd.TensorSpec] = {
    pa.uint16(): rd.TensorSpec((), "uint16"),
    pa.float16(): rd.TensorSpec((), "float16"),
    pa.bool_(): rd.TensorSpec((), "bool"),
    pa.large_string(): rd.TensorSpec((), str),
    pa.string_view(): rd.TensorSpec((), str),
    pa.binary(4): rd.TensorSpec((), bytes),
    pa.dictionary(pa.int8(), pa.string()): rd.TensorSpec((), str),
    pa.list_(pa.float32()): rd.TensorSpec((None,), "float32"),
    pa.large_list(pa.list_(pa.int8(), 3)): rd.TensorSpec((None, 3), "int8"),
    pa.list_(pa.list_(pa.string(), 2), 3): rd.TensorSpec((3, 2), str),
    pa.fixed_shape_tensor(pa.int32(), (2, 0)): rd.TensorSpec((2, 0), "int32"),
    pa.date32(): rd.TensorSpec((), "datetime64[D]"),
    pa.timestamp("us", "Europe/Berlin"): rd.TensorSpec((), "datetime64[us]"),
    pa.list_(pa.time32("ms")): rd.TensorSpec((None,), "timedelta64[ms]"),
    pa.decimal128(5, 2): rd.TensorSpec((), "float64"),
    pa.list_(pa.null()): rd.TensorSpec((None,), "float32"),
    pa.uuid(): rd.TensorSpec((), bytes),
    pa.run_end_encoded(pa.int32(), pa.bool8()): rd.TensorSpec((), "int8"),
}
RAGGED = {"values": rd.TensorSpec((None,), bool), "lengths": rd.TensorSpec((None,), np.int64)}
NESTS: dict[pa.DataType, Any] = {
    pa.list_(pa.struct({"a": pa.int8(), "b": pa.list_(pa.bool_())})): {"a": rd.TensorSpec((None,), "i1"), "b": RAGGED},
    pa.list_(pa.list_(pa.bool_()), 3): {**RAGGED, "lengths": rd.TensorSpec((3,), np.int64)},
    pa.map_(pa.string(), pa.bool_()): {"keys": rd.TensorSpec((None,), str), "values": RAGGED["values"]},
    pa.struct({"b": pa.int8(), "a": pa.string()}): {"b": rd.TensorSpec((), np.int8), "a": rd.TensorSpec((), str)},
}


def test_types() -> None:
    for kind, spec in {**LEAVES, **NESTS}.items():
        assert RowSchema(pa.schema({"x": kind})).spec == {"x": spec}, kind


def test_types_and_names_that_are_no_leaves() -> None:
    cases: list[tuple[Any, str]] = [
        ({"s": pa.struct({"d": pa.month_day_nano_interval()})}, r"Column 's.d' .* got month_day_nano_interval"),
        ({"l": pa.list_(pa.dense_union([pa.field("a", pa.int8())]))}, "Column 'l' .* got dense_union"),
        ({"x": pa.null()}, r"Column 'x' must hold values, got nulls only. Fill them .*fill_null="),
        ({"x": pa.fixed_shape_tensor(pa.int8(), (2, 3), permutation=[1, 0])}, "Column 'x' .*fixed_shape_tensor"),
        ([("x", pa.int8()), ("x", pa.int8())], "got two of the name 'x'"),
        ([], "at least one column, got none"),
    ]
    for schema, message in cases:
        with pytest.raises(rd.SpecError, match=message):
            RowSchema(pa.schema(schema))
    read_names(pa.schema({"a": pa.struct({"b": pa.int8()})}))
    named = pa.schema([pa.field("name", pa.struct([pa.field("inner", pa.int8())]))])
    damaged = pa.ipc.read_schema(pa.py_buffer(named.serialize().to_pybytes().replace(b"inner", b"\xff\xffner")))
    with pytest.raises(UnicodeDecodeError):
        read_names(damaged)


_DEPTH = 3


def _plain_kinds(draw: random.Random) -> list[tuple[pa.DataType, Callable[[], Any]]]:
    """Types without parts, and functions that draw their values."""
    units = ("s", "ms", "us", "ns")
    texts = ["", "a", "ö", "a long text of more than twelve bytes"]
    values: list[tuple[list[pa.DataType], Callable[[], Any]]] = [
        ([pa.int8(), pa.uint16(), pa.int32(), pa.uint64()], lambda: draw.randrange(100)),
        ([pa.float32(), pa.float64()], lambda: draw.randrange(9) / 4),
        ([pa.float16()], lambda: np.float16(draw.randrange(-8, 8) / 4)),
        ([pa.string(), pa.large_string(), pa.string_view()], lambda: draw.choice(texts)),
        (
            [pa.binary(), pa.large_binary(), pa.binary_view()],
            lambda: draw.choice([b"", b"\x00\xff", b"0123456789abcde"]),
        ),
        ([pa.binary(3)], lambda: b"abc"),
        ([pa.date32(), pa.date64()], lambda: datetime.date(2000, 1, 1) + datetime.timedelta(draw.randrange(9999))),
        (
            [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")],
            lambda: datetime.time(draw.randrange(24), draw.randrange(60), draw.randrange(60)),
        ),
        (
            [kind for unit in units for kind in (pa.timestamp(unit), pa.timestamp(unit, "Europe/Berlin"))],
            lambda: datetime.datetime.fromtimestamp(draw.randrange(10**9), datetime.UTC),
        ),
        ([pa.duration(unit) for unit in units], lambda: datetime.timedelta(seconds=draw.randrange(-99999, 99999))),
        ([pa.bool_()], lambda: draw.random() < 0.5),
        ([pa.decimal128(7, 2), pa.decimal256(40, 2)], lambda: decimal.Decimal(draw.randrange(-9999, 9999)) / 100),
        ([pa.null()], lambda: None),
        ([pa.dictionary(pa.int8(), pa.string())], lambda: draw.choice("xyz")),
        ([pa.dictionary(pa.int32(), pa.int64())], lambda: draw.randrange(4)),
    ]
    return [(kind, value) for kinds, value in values for kind in kinds]


def _extensions(draw: random.Random) -> list[tuple[pa.DataType, Callable[[], Any]]]:
    return [
        (pa.uuid(), lambda: uuid.UUID(int=draw.randrange(2**90)).bytes),
        (pa.bool8(), lambda: draw.randrange(2)),
        (pa.fixed_shape_tensor(pa.int16(), (2, 2)), lambda: [draw.randrange(9) for _ in range(4)]),
    ]


def _kind(draw: random.Random, depth: int, ipc: bool) -> tuple[pa.DataType, Callable[[], Any]]:
    """A type, and a function that draws its values."""
    if depth and draw.random() < 0.5:
        return draw.choice([_list, _list, _struct, _map])(draw, depth - 1, ipc)
    kind, value = draw.choice(_plain_kinds(draw))
    if depth == _DEPTH and draw.random() < 0.2:
        kind, value = draw.choice(_extensions(draw))
    if not ipc and kind in (pa.string_view(), pa.binary_view()):  # the writer of Parquet cannot slice them
        return _kind(draw, depth, ipc)
    return kind, value


def _nullable(draw: random.Random, value: Callable[[], Any], share: float = 0.25) -> Callable[[], Any]:
    return lambda: None if draw.random() < share else value()


def _list(draw: random.Random, depth: int, ipc: bool) -> tuple[pa.DataType, Callable[[], Any]]:
    kind, value = _kind(draw, depth, ipc)
    value = _nullable(draw, value)
    size = draw.randrange(1, 4)
    form = draw.randrange(3 + 2 * ipc)  # Parquet keeps no list views
    if form == 0:
        return pa.list_(kind, size), lambda: [value() for _ in range(size)]
    makers: Any = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]
    return makers[form - 1](kind), lambda: [value() for _ in range(draw.randrange(4))]


def _struct(draw: random.Random, depth: int, ipc: bool) -> tuple[pa.DataType, Callable[[], Any]]:
    fields = {name: _kind(draw, depth, ipc) for name in "abc"[: draw.randrange(1, 4)]}
    values = {name: _nullable(draw, value) for name, (_, value) in fields.items()}
    kind = pa.struct([pa.field(name, one) for name, (one, _) in fields.items()])
    return kind, lambda: {name: value() for name, value in values.items()}


def _map(draw: random.Random, depth: int, ipc: bool) -> tuple[pa.DataType, Callable[[], Any]]:
    kind, value = _kind(draw, depth, ipc)
    value = _nullable(draw, value)
    return pa.map_(pa.string(), kind), lambda: [(f"k{i}", value()) for i in range(draw.randrange(3))]


def random_table(seed: int, *, ipc: bool) -> pa.Table:
    """Return a table of some rows in several chunks. With `ipc`, its types may be unknown to Parquet."""
    draw = random.Random(seed)
    columns, rows = {}, draw.randrange(1, 12)
    for name in "xyz"[: draw.randrange(1, 4)]:
        kind, value = _kind(draw, _DEPTH, ipc)
        value = _nullable(draw, value, draw.choice([0, 0.3]))
        values = [value() for _ in range(rows)]
        columns[name] = _array(values, kind)
        if ipc and draw.random() < 0.2 and not pa.types.is_nested(kind) and not isinstance(kind, pa.BaseExtensionType):
            columns[name] = _run_ends(columns[name])
    whole = pa.table(columns)
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:  # pyarrow has made indices of an empty dictionary beneath null structs
        return random_table(seed + 1000, ipc=ipc)
    cut = draw.randrange(rows + 1)
    return pa.concat_tables([whole.slice(0, cut), whole.slice(cut)])


def _array(values: list[Any], kind: Any) -> pa.Array:
    if not isinstance(kind, pa.BaseExtensionType):
        return pa.array(values, kind)
    return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))


def _run_ends(array: pa.Array) -> pa.Array:
    try:
        return pa.RunEndEncodedArray.from_arrays(pa.array(range(1, len(array) + 1), pa.int32()), array)
    except pa.ArrowException:
        return array


def original(row: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """Return the row as `to_pylist` gives it, from an element with all masks. Dates and times stay numpy values."""
    return {field.name: _entries(row, field.name, field.type, ())[0] for field in schema}


def _entries(found: dict[str, Any], name: str, kind: Any, shape: tuple[int, ...]) -> list[Any]:
    """The values of an Arrow type whose leaves have these first dimensions, one after the other."""
    nulls = np.asarray(found[f"{name}_is_null"]).reshape(-1).tolist()
    values = _values(found, name, kind, shape)
    assert len(values) == len(nulls) == np.prod(shape, dtype=int)
    return [None if is_null else value for is_null, value in zip(nulls, values, strict=True)]


def _values(found: dict[str, Any], name: str, kind: Any, shape: tuple[int, ...]) -> list[Any]:
    items = {key.removeprefix(name): value for key, value in found.items() if key.startswith(f"{name}_item")}
    if isinstance(kind, pa.FixedShapeTensorType):
        lists = {name: found[name], **{name + end: value for end, value in items.items()}}
        lists = {key: np.reshape(value, (*shape, kind.storage_type.list_size)) for key, value in lists.items()}
        return _values(lists, name, kind.storage_type, shape)
    if pa.types.is_map(kind):
        pair = pa.struct([pa.field("keys", kind.key_type, nullable=False), pa.field("values", kind.item_type)])
        pairs = _values(found, name, pa.list_(pair), shape)
        return [[(pair["keys"], pair["values"]) for pair in one] for one in pairs]
    if pa.types.is_struct(kind):
        inner = found[name] | {f"{field.name}_is_null": np.zeros(shape, bool) for field in kind if not field.nullable}
        columns = [_entries(inner, field.name, field.type, shape) for field in kind]
        return [dict(zip([field.name for field in kind], values, strict=True)) for values in zip(*columns, strict=True)]
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        flat = _entries({"_item": found[name], **items}, "_item", kind.value_type, (*shape, size))
        return [flat[at : at + size] for at in range(0, len(flat), size)]
    if hasattr(kind, "value_field"):
        mask = items["_item_is_null"]
        lengths = [len(mask)] if shape == () else found[name]["lengths"].reshape(-1).tolist()
        values = found[name] if shape == () else found[name]["values"]
        flat = _entries({"_item": values, **items}, "_item", kind.value_type, (sum(lengths),))
        ends = np.cumsum(lengths).tolist()
        return [flat[end - length : end] for length, end in zip(lengths, ends, strict=True)]
    leaves = np.asarray(found[name], None if isinstance(found[name], np.ndarray | np.generic) else object)
    assert leaves.shape == shape, (name, kind)
    return list(leaves.reshape(-1))


def alike(mine: Any, theirs: Any) -> bool:
    """Return True if a value of `original` equals that of `to_pylist`."""
    if mine is None or theirs is None:
        return mine is theirs
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(alike(mine[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return len(mine) == len(theirs) and all(map(alike, mine, theirs))
    theirs = _plain(theirs, mine)
    if isinstance(theirs, datetime.date | datetime.timedelta):
        return bool(mine == np.asarray(theirs).astype(mine.dtype))
    return bool(mine == theirs) and isinstance(mine, bytes) == isinstance(theirs, bytes)


def _plain(theirs: Any, mine: Any) -> Any:
    if isinstance(theirs, datetime.time):
        theirs = datetime.datetime.combine(datetime.date.min, theirs) - datetime.datetime.min
    if isinstance(theirs, datetime.datetime) and theirs.tzinfo is not None:
        theirs = theirs.astimezone(datetime.UTC).replace(tzinfo=None)
    if isinstance(theirs, decimal.Decimal):
        theirs = str(theirs) if isinstance(mine, str) else float(theirs)
    if isinstance(theirs, uuid.UUID):
        theirs = theirs.bytes
    return theirs


def has_null(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(has_null, value.values() if isinstance(value, dict) else value))
    return value is None


def without_masks(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: without_masks(part) for name, part in value.items() if not name.endswith("_is_null")}


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
    inner = pa.table(
        {
            "n": pa.array([1, None], pa.uint8()),
            "x": pa.array([0.5, None], pa.float32()),
            "l": pa.array([[1, None], None], pa.list_(pa.int16())),
            "f": pa.array([[1, None], None], pa.list_(pa.int16(), 2)),
            "m": pa.array([[("k", None)], None], pa.map_(pa.string(), pa.int8())),
            "dec": pa.array([decimal.Decimal("0.10"), None]),
        }
    )
    found = list(rd.Dataset.from_arrow(inner, fill_null=7).as_numpy_iterator())
    assert [(row["n"], row["x"], row["dec"]) for row in found] == [(1, 0.5, 0.1), (7, 7.0, 7.0)]
    assert [row["l"].tolist() for row in found] == [[1, 7], []]
    assert [row["f"].tolist() for row in found] == [[1, 7], [7, 7]]
    assert [row["m"]["values"].tolist() for row in found] == [[7], []]
    with pytest.raises(rd.SpecError, match=r"column 'l' has one in row 0\. Give fill_null=.*null_masks=True"):
        rd.Dataset.from_arrow(inner.select(["l"]), fill_null={"l": [8, 9]})  # of [1, None] the list has a value
    outer = pa.table(
        {
            "s": pa.array(["a", None]),
            "l": pa.array([[1], None], pa.list_(pa.int16())),
            "f": pa.array([[1, 2], None], pa.list_(pa.int16(), 2)),
            "st": pa.array([{"a": 1, "b": None}, None], pa.struct({"a": pa.int8(), "b": pa.string()})),
            "m": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int8())),
            "d": pa.array([datetime.date(2020, 1, 2), None]),
            "dec": pa.array([decimal.Decimal("0.10"), None]),
            "none": pa.nulls(2),
        }
    )
    values = {
        **{"s": "?", "l": [8, 9], "f": (3, 4), "st": {"a": -1, "b": ""}, "m": {"z": 5}, "d": "1970-01-03"},
        **{"dec": decimal.Decimal("1.25"), "none": "nothing"},
    }
    _, row = rd.Dataset.from_arrow(outer, fill_null=values, decimals="text").as_numpy_iterator()
    assert (row["l"].tolist(), row["f"].tolist(), row["st"]) == ([8, 9], [3, 4], {"a": -1, "b": ""})
    assert (row["m"]["keys"].tolist(), row["m"]["values"].tolist()) == (["z"], [5])
    assert (row["s"], row["d"], row["dec"], row["none"]) == ("?", np.datetime64("1970-01-03"), "1.25", "nothing")


def test_arguments_that_do_not_fit() -> None:
    table = pa.table({"x": pa.array([1], pa.int8()), "s": pa.array([{"a": 1}])})
    cases: list[tuple[dict[str, Any], str]] = [
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
    ]
    for arguments, message in cases:
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


def test_elements_are_the_rows_of_arrow(tmp_path: Path) -> None:
    """With masks, whatever is null; without, a row with a null is an error, and the others are as with masks."""
    rows_without_nulls = 0
    for seed in range(40):
        decimals, ipc = "text" if seed % 4 > 1 else "float64", seed % 2 == 0
        table, path = random_table(seed, ipc=ipc), str(tmp_path / "x")
        if ipc:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
            sources: list[Any] = [(rd.Dataset.from_arrow, source) for source in (table, path)]
        else:
            pq.write_table(table, path, row_group_size=4)
            table = pq.read_table(path)
            sources = [(rd.Dataset.from_parquet, path)]
        expected = table.to_pylist()
        for read, source in sources:
            masked = list(read(source, null_masks=True, decimals=decimals).as_numpy_iterator())
            rows = [original(row, table.schema) for row in masked]
            assert len(rows) == table.num_rows
            assert all(map(alike, rows, expected)), seed
            if any("null" in str(kind) for kind in table.schema.types):
                continue  # a column of nulls only is refused
            if source is table and any(map(has_null, expected)):
                with pytest.raises(rd.SpecError, match="must not have nulls"):
                    read(source, decimals=decimals)
                continue
            found = collect(iterate(read(source, decimals=decimals)))
            assert [is_error(item) for item in found] == [has_null(row) for row in expected], seed
            for number, item in enumerate(found):
                if is_error(item):
                    assert item[0] == "SpecError", item
                else:
                    assert same([item], [without_masks(masked[number])]), seed
                    rows_without_nulls += 1
    assert rows_without_nulls > 20
