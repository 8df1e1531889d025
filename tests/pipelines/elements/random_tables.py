"""Random Arrow tables of any types, nested and with nulls, and their rows as elements have them: for property tests."""

from __future__ import annotations

import datetime
import decimal
import random
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["alike", "original", "random_table"]

_DEPTH = 3


def _numbers(draw: random.Random) -> tuple[pa.DataType, Callable[[], Any]]:
    kind = draw.choice([pa.int8(), pa.uint16(), pa.int32(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()])
    if pa.types.is_floating(kind):
        return kind, lambda: np.float16(draw.randrange(-8, 8) / 4) if kind == pa.float16() else draw.randrange(9) / 4
    return kind, lambda: draw.randrange(100)


def _text(draw: random.Random) -> tuple[pa.DataType, Callable[[], Any]]:
    kinds = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()]
    kind = draw.choice([*kinds, pa.binary(3)])
    if "string" in str(kind):
        return kind, lambda: draw.choice(["", "a", "ö", "a long text of more than twelve bytes"])
    return kind, lambda: b"abc" if kind == pa.binary(3) else draw.choice([b"", b"\x00\xff", b"0123456789abcdef"])


def _times(draw: random.Random) -> tuple[pa.DataType, Callable[[], Any]]:
    unit = draw.choice(["s", "ms", "us", "ns"])
    kind = draw.choice(
        [
            *(pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
            *(pa.timestamp(unit), pa.timestamp(unit, "Europe/Berlin"), pa.duration(unit)),
        ]
    )
    if pa.types.is_date(kind):
        return kind, lambda: datetime.date(2000, 1, 1) + datetime.timedelta(draw.randrange(9999))
    if pa.types.is_time(kind):
        return kind, lambda: datetime.time(draw.randrange(24), draw.randrange(60), draw.randrange(60))
    if pa.types.is_duration(kind):
        return kind, lambda: datetime.timedelta(seconds=draw.randrange(-99999, 99999))
    return kind, lambda: datetime.datetime.fromtimestamp(draw.randrange(10**9), datetime.UTC)


def _others(draw: random.Random) -> tuple[pa.DataType, Callable[[], Any]]:
    kind = draw.choice(
        [
            *(pa.bool_(), pa.decimal128(7, 2), pa.decimal256(40, 2), pa.null()),
            *(pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.int64())),
        ]
    )
    values: dict[Any, Callable[[], Any]] = {
        pa.null(): lambda: None,
        pa.dictionary(pa.int8(), pa.string()): lambda: draw.choice("xyz"),
        pa.dictionary(pa.int32(), pa.int64()): lambda: draw.randrange(4),
    }
    if pa.types.is_decimal(kind):
        return kind, lambda: decimal.Decimal(draw.randrange(-9999, 9999)) / 100
    return kind, values.get(kind, lambda: draw.random() < 0.5)


def _extensions(draw: random.Random) -> tuple[pa.DataType, Callable[[], Any]]:
    kind = draw.choice([pa.uuid(), pa.bool8(), pa.fixed_shape_tensor(pa.int16(), (2, 2))])
    if kind == pa.uuid():
        return kind, lambda: uuid.UUID(int=draw.randrange(2**90)).bytes
    return kind, lambda: draw.randrange(2) if kind == pa.bool8() else [draw.randrange(9) for _ in range(4)]


def _kind(draw: random.Random, depth: int, ipc: bool) -> tuple[pa.DataType, Callable[[], Any]]:
    """A type, and a function that draws its values."""
    if depth and draw.random() < 0.5:
        return draw.choice([_list, _list, _struct, _map])(draw, depth - 1, ipc)
    plain = [_numbers, _text, _times, _others]
    kind, value = draw.choice([*plain, _extensions] if depth == _DEPTH else plain)(draw)
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
    """A table of some rows in several chunks. `ipc`: also of types that Parquet does not have."""
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
    """The row as `to_pylist` gives it, put together from an element with all masks. Dates, ... stay numpy's."""
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
    """Whether a value of `original` is the one of `to_pylist`."""
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
