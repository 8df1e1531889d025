"""Arrow types as leaves of elements.

The classes describe what a type becomes (`arrow_fields.py` makes them from a schema): they give the specs of leaves,
and make columns of arrays.

| Arrow type                               | leaf                                                                      |
|------------------------------------------|---------------------------------------------------------------------------|
| numbers, bools                           | the same type                                                             |
| strings, binary values                   | str, bytes                                                                |
| dates, timestamps                        | `datetime64` with the unit of the type; with a time zone: the UTC instant |
| times of day, durations                  | `timedelta64` with the unit of the type; times since midnight             |
| decimals                                 | float64 or str                                                            |
| dictionaries, run-end encoded, extension | what their values or their storage are                                    |
| struct                                   | a dict                                                                    |
| fixed-size list, `fixed_shape_tensor`    | a further dimension                                                       |
| list                                     | a dimension of differing length; of structs: a dict of such leaves        |
| list in a list                           | a dict: "values" of all inner lists, joined, and their "lengths"          |
| map                                      | a dict of lists: "keys" and "values"                                      |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import pyarrow as pa

from raydist.pipelines.elements.blocks import Column, object_column
from raydist.pipelines.elements.spec import TensorSpec

__all__ = [
    "ArrowField",
    "ArrowList",
    "ArrowLeaf",
    "ArrowStruct",
    "ArrowValue",
    "ITEM",
    "RowNulls",
    "Spread",
    "may_have_nulls",
    "plain_array",
    "plain_type",
    "read_names",
]

_Mask = np.ndarray[Any, np.dtype[np.bool_]]
ITEM = "_item"
"""The name of the items of lists: that of their masks is made with it."""


@final
class RowNulls:
    """The rows with a null that has neither a fill value nor a mask, and one column of each."""

    def __init__(self) -> None:
        self.rows: dict[int, str] = {}

    def add(self, path: str, rows: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Note a null of the value at `path` in `rows`."""
        for row in rows.tolist():
            self.rows.setdefault(row, path)


@final
@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of the entries of an array over the rows of a block.

    Attributes:
        num_rows: Rows of the block.
        shape: Dimensions of fixed length inside a row, or inside each entry of a list of the row.
        ends: For lists: how many entries (of that shape) the rows up to each row have. None: each row has one.
    """

    num_rows: int
    shape: tuple[int, ...] = ()
    ends: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def column(self, values: np.ndarray[Any, Any]) -> Column:
        """The rows of `values`, which has one value for each entry of the array."""
        values = values.reshape(self._count, *self.shape, *values.shape[1:])
        if self.ends is None:
            return values
        ends = self.ends.tolist()
        return object_column([values[start:end] for start, end in zip([0, *ends], ends, strict=False)])

    @property
    def _count(self) -> int:
        if self.ends is None:
            return self.num_rows
        return int(self.ends[-1]) if len(self.ends) else 0

    def rows(self, mask: _Mask) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The rows in which `mask`, which has one value for each entry, is true."""
        found = np.flatnonzero(mask) // max(1, math.prod(self.shape))
        return np.unique(found if self.ends is None else np.searchsorted(self.ends, found, side="right"))

    def fixed(self, shape: tuple[int, ...]) -> Spread:
        """The distribution of the values of arrays of this shape."""
        return Spread(self.num_rows, (*self.shape, *shape), self.ends)

    def listed(self, lengths: np.ndarray[Any, np.dtype[np.int64]]) -> Spread:
        """The distribution of the values of lists of these lengths."""
        sums = np.concatenate([[0], np.cumsum(lengths)])
        entries = np.arange(1, self.num_rows + 1) if self.ends is None else self.ends
        return Spread(self.num_rows, (), sums[entries * math.prod(self.shape)])

    @property
    def is_flat(self) -> bool:
        """Whether each row has one entry."""
        return self.ends is None and not self.shape


class _Made(NamedTuple):
    """A nest of specs or columns, and the masks of list items: they stand beside the value, under its name and theirs.

    Attributes:
        nest: The nest.
        masks: The ends of names, and specs or columns.
    """

    nest: Any
    masks: dict[str, Any]


class ArrowValue(ABC):
    """An Arrow type."""

    fills: bool
    """Whether nulls of this type get a value."""

    @abstractmethod
    def specs(self, shape: tuple[int | None, ...]) -> _Made:
        """The nest of TensorSpec, with the dimensions of the lists around."""

    @abstractmethod
    def columns(self, array: pa.Array, spread: Spread, nulls: RowNulls) -> _Made:
        """The nest of columns of an array. Nulls that have no other value are zeros or empty."""


@final
@dataclass(frozen=True, slots=True)
class ArrowField:
    """A column of a table, a field of a struct, or the items of a list.

    Attributes:
        name: Its key in the dict that it belongs to.
        path: Its place in the schema, for messages.
        value: Its type.
        nullable: Whether the schema allows nulls.
        masked: Whether its column has masks.
    """

    name: str
    path: str
    value: ArrowValue
    nullable: bool
    masked: bool

    def specs(self, shape: tuple[int | None, ...] = ()) -> dict[str, Any]:
        """TensorSpecs by key."""
        mask = TensorSpec(shape, np.bool_) if self.masked and self.nullable else None
        return self._named(self.value.specs(shape), mask)

    def columns(self, array: pa.Array, spread: Spread, nulls: RowNulls, outer: _Mask | None = None) -> dict[str, Any]:
        """Columns of an array by key. `outer` tells the entries that are null because what they belong to is."""
        array = plain_array(array)
        if outer is not None:
            array = pa.StructArray.from_arrays([array], names=["value"], mask=pa.array(outer)).flatten()[0]
            nulls = RowNulls() if self.masked and not self.nullable else nulls  # the mask of the outer value tells
        mask = _null_mask(array)
        if mask is not None and not (self.masked and self.nullable) and not self.value.fills:
            nulls.add(self.path, spread.rows(mask))
        made = self.value.columns(array, spread, nulls)
        if not (self.masked and self.nullable):
            return self._named(made, None)
        return self._named(made, spread.column(np.zeros(len(array), np.bool_) if mask is None else mask))

    def _named(self, made: _Made, mask: Any) -> dict[str, Any]:
        masks = made.masks if mask is None else {"_is_null": mask, **made.masks}
        return {self.name: made.nest} | {self.name + end: found for end, found in masks.items()}


@final
@dataclass(frozen=True, slots=True)
class ArrowLeaf(ArrowValue):
    """Numbers, text or times.

    Attributes:
        dtype: Of the leaf.
        kind: The Arrow type that values are read as.
        null: What stands for a null, as a value of `kind`.
        fills: Whether the user chose that.
    """

    dtype: np.dtype[Any]
    kind: pa.DataType
    null: Any
    fills: bool

    def specs(self, shape: tuple[int | None, ...]) -> _Made:
        return _Made(TensorSpec(shape, self.dtype), {})

    def columns(self, array: pa.Array, spread: Spread, nulls: RowNulls) -> _Made:
        if pa.types.is_null(array.type):
            array = pa.nulls(len(array), self.kind)
        elif pa.types.is_decimal(array.type):
            array = array.cast(pa.string())  # a cast from there to float64 rounds correctly, one from decimals does not
        elif self.dtype.kind in "mM":
            array = array.view(pa.int64() if array.type.bit_width == 64 else pa.int32())
        if array.type != self.kind:
            array = array.cast(self.kind)
        if array.null_count:
            array = array.fill_null(pa.scalar(self.null, self.kind))
        if self.dtype.kind in "SU":
            return _Made(spread.column(object_column(array.to_pylist())), {})
        values = np.asarray(array.to_numpy(zero_copy_only=False))
        return _Made(spread.column(values.view(self.dtype) if self.dtype.kind in "mM" else values), {})


@final
@dataclass(frozen=True, slots=True)
class ArrowStruct(ArrowValue):
    """Named values."""

    fields: tuple[ArrowField, ...]
    fills: bool

    def specs(self, shape: tuple[int | None, ...]) -> _Made:
        return _Made({key: spec for one in self.fields for key, spec in one.specs(shape).items()}, {})

    def columns(self, array: pa.Array, spread: Spread, nulls: RowNulls) -> _Made:
        mask = _null_mask(array)
        found: dict[str, Any] = {}
        for number, one in enumerate(self.fields):
            found |= one.columns(array.field(number), spread, nulls, mask)
        return _Made(found, {})


@final
@dataclass(frozen=True, slots=True)
class ArrowList(ArrowValue):
    """Lists.

    Attributes:
        items: What the lists hold, under the name "_item".
        shape: Dimensions of their values; None: the length differs.
        fill: A whole list for nulls; None: an empty list, or one of items that have a fill value.
        fills: Whether nulls get a value.
    """

    items: ArrowField
    shape: tuple[int, ...] | None
    fill: pa.Scalar | None
    fills: bool

    def specs(self, shape: tuple[int | None, ...]) -> _Made:
        if self.shape is not None:
            return _unnamed(self.items.specs((*shape, *self.shape)))
        found = _unnamed(self.items.specs((None,)))
        return (
            found if shape == () else _Made({"values": found.nest, "lengths": TensorSpec(shape, np.int64)}, found.masks)
        )

    def columns(self, array: pa.Array, spread: Spread, nulls: RowNulls) -> _Made:
        if self.fill is not None and array.null_count:
            array = array.fill_null(self.fill)
        if self.shape is not None:
            return self._fixed(array, self.shape, spread, nulls)
        lengths = np.asarray(array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), np.int64)
        found = _unnamed(self.items.columns(_flat(array, lengths), spread.listed(lengths), nulls))
        if spread.is_flat:
            return found
        return _Made({"values": found.nest, "lengths": spread.column(lengths)}, found.masks)

    def _fixed(self, array: pa.Array, shape: tuple[int, ...], spread: Spread, nulls: RowNulls) -> _Made:
        size, mask = math.prod(shape), _null_mask(array)
        values = array.values.slice(array.offset * size, len(array) * size)
        outer = None if mask is None else np.repeat(mask, size)
        return _unnamed(self.items.columns(values, spread.fixed(shape), nulls, outer))


def _unnamed(found: dict[str, Any]) -> _Made:
    """The value of the items of a list, and its masks."""
    nest = found.pop(ITEM)
    return _Made(nest, found)


def _flat(array: pa.Array, lengths: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Array:
    """The items of lists, one list after the other. None are of nulls."""
    if not (pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type)):
        return array.flatten()
    starts = np.cumsum(lengths) - lengths  # `flatten` of views loses items of the null type
    items = np.repeat(array.offsets.to_numpy().astype(np.int64) - starts, lengths) + np.arange(lengths.sum())
    if not len(items) or (np.diff(items) == 1).all():
        return array.values.slice(items[0] if len(items) else 0, len(items))
    return array.values.take(pa.array(items))


def _null_mask(array: pa.Array) -> _Mask | None:
    """Which entries are null; None where none is."""
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False)) if array.null_count else None


def plain_array(array: pa.Array) -> pa.Array:
    """The same values in an array whose type says only what they are."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return plain_array(array.storage)
    if pa.types.is_dictionary(kind):
        return plain_array(array.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        entries = np.arange(array.offset, array.offset + len(array))  # `run_end_decode` does not know all types
        runs = np.searchsorted(array.run_ends.to_numpy(), entries, side="right")
        return plain_array(array.values).take(pa.array(runs))
    plain = plain_type(kind)
    if pa.types.is_map(kind):  # a map lies as a list of structs does, and a cast loses values of the null type
        pairs = pa.StructArray.from_arrays([array.keys, array.items], fields=list(plain.value_type))
        return pa.Array.from_buffers(plain, len(array), array.buffers()[:2], offset=array.offset, children=[pairs])
    return array if plain == kind else array.cast(plain)


def plain_type(kind: Any) -> pa.DataType:
    """The type of the plain array."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.large_binary()
    if pa.types.is_map(kind):
        return pa.list_(pa.struct([kind.key_field.with_name("keys"), kind.item_field.with_name("values")]))
    return kind


def may_have_nulls(array: pa.Array) -> bool:
    """Whether a null may lie in the array at any depth. Looks at no value."""
    kind = array.type
    if array.null_count:
        return True
    if isinstance(kind, pa.BaseExtensionType):
        return may_have_nulls(array.storage)
    if pa.types.is_dictionary(kind):
        return may_have_nulls(array.dictionary)
    if pa.types.is_run_end_encoded(kind) or pa.types.is_map(kind):
        return may_have_nulls(array.values)
    if pa.types.is_struct(kind):
        return any(may_have_nulls(array.field(number)) for number in range(kind.num_fields))
    return kind.num_fields > 0 and may_have_nulls(array.values)


def read_names(fields: Iterable[pa.Field]) -> None:
    """Raise UnicodeDecodeError where a name is no text. Arrow decodes names when they are asked for."""
    for one in fields:
        _ = one.name
        if pa.types.is_nested(one.type):
            read_names(one.type.field(number) for number in range(one.type.num_fields))
