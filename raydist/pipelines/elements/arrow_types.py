"""Arrow types as leaves of elements.

The classes describe the leaves of a type (`arrow_fields.py` makes them from a schema). Their methods return the specs
of the leaves, and make columns from arrays.

| Arrow type                               | leaf                                                                      |
|------------------------------------------|---------------------------------------------------------------------------|
| numbers, bools                           | the same type                                                             |
| strings, binary values                   | str, bytes                                                                |
| dates, timestamps                        | `datetime64` with the unit of the type; with a time zone: the UTC instant |
| times of day, durations                  | `timedelta64` with the unit of the type; times since midnight             |
| decimals                                 | float64 or str                                                            |
| dictionaries, run-end encoded, extension | the leaf of their values or of their storage type                         |
| struct                                   | a dict                                                                    |
| fixed-size list, `fixed_shape_tensor`    | a further dimension                                                       |
| list                                     | a dimension of any length; a list of structs: a dict of such leaves       |
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

_Mask = np.ndarray[Any, np.dtype[np.bool_]]
ITEM = "_item"
"""Name of the items of lists, which is part of the names of their masks."""


@final
class RowNulls:
    """The rows with a null that has neither a fill value nor a mask, with one column each."""

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
        shape: Dimensions of fixed length inside a row, or inside each entry of a row's list.
        ends: For lists: number of entries (of that shape) up to the end of each row. None: each row has one entry.
    """

    num_rows: int
    shape: tuple[int, ...] = ()
    ends: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def column(self, values: np.ndarray[Any, Any]) -> Column:
        """Return the column of rows of `values`, which has one value for each entry of the array."""
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
        """Return the rows in which `mask`, which has one value for each entry, is true."""
        found = np.flatnonzero(mask) // max(1, math.prod(self.shape))
        return np.unique(found if self.ends is None else np.searchsorted(self.ends, found, side="right"))

    def fixed(self, shape: tuple[int, ...]) -> Spread:
        """Return the distribution of the values of arrays of this shape."""
        return Spread(self.num_rows, (*self.shape, *shape), self.ends)

    def listed(self, lengths: np.ndarray[Any, np.dtype[np.int64]]) -> Spread:
        """Return the distribution of the values of lists of these lengths."""
        sums = np.concatenate([[0], np.cumsum(lengths)])
        entries = np.arange(1, self.num_rows + 1) if self.ends is None else self.ends
        return Spread(self.num_rows, (), sums[entries * math.prod(self.shape)])

    @property
    def is_flat(self) -> bool:
        """Return True if each row has one entry."""
        return self.ends is None and not self.shape


class _Made(NamedTuple):
    """A nest of specs or columns, and the masks of list items, which become siblings of the value."""

    nest: Any
    masks: dict[str, Any]


class ArrowValue(ABC):
    """Interface of an Arrow type."""

    fills: bool
    """True if nulls of this type have a replacement."""

    @abstractmethod
    def specs(self, shape: tuple[int | None, ...]) -> _Made:
        """Return the nest of TensorSpec, with the dimensions of the surrounding lists."""

    @abstractmethod
    def columns(self, array: pa.Array, spread: Spread, nulls: RowNulls) -> _Made:
        """Return the nest of columns of an array. Nulls without replacement are zeros or empty."""


@final
@dataclass(frozen=True, slots=True)
class ArrowField:
    """A column of a table, a field of a struct, or the items of a list."""

    name: str
    path: str
    value: ArrowValue
    nullable: bool
    masked: bool

    def specs(self, shape: tuple[int | None, ...] = ()) -> dict[str, Any]:
        """Return the TensorSpecs by key."""
        mask = TensorSpec(shape, np.bool_) if self.masked and self.nullable else None
        return self._named(self.value.specs(shape), mask)

    def columns(self, array: pa.Array, spread: Spread, nulls: RowNulls, outer: _Mask | None = None) -> dict[str, Any]:
        """Return the columns of an array by key. `outer` marks entries that are null because their parent is null."""
        array = plain_array(array)
        if outer is not None:
            array = pa.StructArray.from_arrays([array], names=["value"], mask=pa.array(outer)).flatten()[0]
            nulls = RowNulls() if self.masked and not self.nullable else nulls  # the mask of the parent marks the null
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
    """A type of numbers, text or times.

    Attributes:
        dtype: Dtype of the leaf.
        kind: Arrow type to which values are cast.
        null: Replacement for nulls, as a value of `kind`.
        fills: True if the user chose the replacement.
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
            array = array.cast(pa.string())  # text to float64 rounds correctly, a cast of decimals does not
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
    """A type of named values."""

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
    """A type of lists.

    Attributes:
        items: Field of the items, with the name "_item".
        shape: Dimensions of the lists; None for lists of any length.
        fill: A whole list as replacement for nulls; None: an empty list, or a list of replacement items.
        fills: True if nulls have a replacement.
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
    """Return the nest of the items of a list, and their masks."""
    nest = found.pop(ITEM)
    return _Made(nest, found)


def _flat(array: pa.Array, lengths: np.ndarray[Any, np.dtype[np.int64]]) -> pa.Array:
    """Return the items of lists, one list after the other. Null lists have none."""
    if not (pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type)):
        return array.flatten()
    starts = np.cumsum(lengths) - lengths  # `flatten` of views loses items of the null type
    items = np.repeat(array.offsets.to_numpy().astype(np.int64) - starts, lengths) + np.arange(lengths.sum())
    if not len(items) or (np.diff(items) == 1).all():
        return array.values.slice(items[0] if len(items) else 0, len(items))
    return array.values.take(pa.array(items))


def _null_mask(array: pa.Array) -> _Mask | None:
    """Return the mask of null entries; None if there are none."""
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False)) if array.null_count else None


def plain_array(array: pa.Array) -> pa.Array:
    """Return the same values in an array without dictionary, run-end, extension, view or map type."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return plain_array(array.storage)
    if pa.types.is_dictionary(kind):
        return plain_array(array.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        entries = np.arange(array.offset, array.offset + len(array))  # `run_end_decode` does not support all types
        runs = np.searchsorted(array.run_ends.to_numpy(), entries, side="right")
        return plain_array(array.values).take(pa.array(runs))
    plain = plain_type(kind)
    if pa.types.is_map(kind):  # a map has the layout of a list of structs, and a cast loses values of the null type
        pairs = pa.StructArray.from_arrays([array.keys, array.items], fields=list(plain.value_type))
        return pa.Array.from_buffers(plain, len(array), array.buffers()[:2], offset=array.offset, children=[pairs])
    return array if plain == kind else array.cast(plain)


def plain_type(kind: Any) -> pa.DataType:
    """Return the type of the plain array."""
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
    """Return True if the array may contain a null at any depth. Reads no value."""
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
    """Raise UnicodeDecodeError if a name is no text. Arrow decodes names on access."""
    for one in fields:
        _ = one.name
        if pa.types.is_nested(one.type):
            read_names(one.type.field(number) for number in range(one.type.num_fields))
