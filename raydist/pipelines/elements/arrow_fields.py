"""Conversion of a table's schema, with the user's choices about nulls and decimals, to leaves."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import pyarrow as pa

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.pipelines.elements.arrow_types import (
    ITEM,
    ArrowField,
    ArrowLeaf,
    ArrowList,
    ArrowStruct,
    ArrowValue,
    plain_array,
    plain_type,
)
from raydist.pipelines.elements.spec import BYTES, STR

_ADVICE = (
    "Give fill_null=value (or {column: value}) to fill nulls, null_masks=True to get a mask leaf beside each column"
)
_DECIMALS = {"float64": pa.float64(), "text": pa.string()}
_NO_VALUE: Any = object()  # stands for a missing fill value
_NAT = np.datetime64("NaT").astype(np.int64).item()
_BOOL8 = "arrow.bool8"


@final
@dataclass(frozen=True)
class Conversion:
    """The user's choices about nulls and decimals: the arguments of `from_parquet` and `from_arrow`.

    Attributes:
        fill_null: A value for nulls, or a dict of values by column; None keeps nulls.
        null_masks: True if columns get boolean leaves that mark nulls, or the names of such columns.
        decimals: Type of the leaves of decimal columns, "float64" or "text".
        by_default: Fill values of columns for which the user gives none by name.
    """

    fill_null: Any = None
    null_masks: bool | tuple[str, ...] = False
    decimals: str = "float64"
    by_default: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, fill_null: Any, null_masks: bool | Sequence[str], decimals: str) -> Conversion:
        """Check the arguments, as far as possible without a schema."""
        if decimals not in _DECIMALS:
            raise InvalidArgumentError(f'decimals must be "float64" or "text", got {decimals!r}.')
        if isinstance(null_masks, bool):
            return cls(fill_null, null_masks, decimals)
        if isinstance(null_masks, str) or not all(isinstance(name, str) for name in null_masks):
            raise InvalidArgumentError(f"null_masks must be True, False or a list of columns, got {null_masks!r}.")
        return cls(fill_null, tuple(null_masks), decimals)

    def check(self, schema: pa.Schema) -> None:
        """Raise InvalidArgumentError if a named column does not exist, or a fill value fits no column."""
        by_column = isinstance(self.fill_null, Mapping)
        filled = list(self.fill_null) if by_column else []
        masked = [] if isinstance(self.null_masks, bool) else list(self.null_masks)
        for argument, given in (("fill_null", filled), ("null_masks", masked)):
            for name in given:
                if name not in schema.names:
                    columns = ", ".join(schema.names)
                    raise InvalidArgumentError(
                        f"{argument} must name columns that are read ({columns:.500}), got {name!r}."
                    )
        fields = fields_of_schema(schema, self)
        unfit = [field.path for field in fields if field.path in filled and not field.value.fills]
        if unfit:
            value, kind = self.fill_null[unfit[0]], schema.field(unfit[0]).type
            raise InvalidArgumentError(
                f"A fill value must be one of its column, got {value!r:.200} for column {unfit[0]!r} of type {kind}."
            )
        if self.fill_null is not None and not by_column and not any(field.value.fills for field in fields):
            raise InvalidArgumentError(
                f"fill_null must be a value of one of the columns ({schema.to_string():.500}), got "
                f"{self.fill_null!r:.200}. Give {{column: value}}."
            )

    def of_column(self, column: str) -> _Choice:
        """Return the choices for one column."""
        fill = self.by_default.get(column, _NO_VALUE if self.fill_null is None else self.fill_null)
        if isinstance(self.fill_null, Mapping):
            fill = self.fill_null.get(column, self.by_default.get(column, _NO_VALUE))
        masked = self.null_masks if isinstance(self.null_masks, bool) else column in self.null_masks
        return _Choice(fill, masked, self.decimals)


@final
@dataclass(frozen=True, slots=True)
class _Choice:
    """The user's choices about one value; see :class:`Conversion`."""

    fill: Any
    masked: bool
    decimals: str

    def filled(self, fill: Any) -> _Choice:
        """Return the same choices with another fill value."""
        return _Choice(fill, self.masked, self.decimals)


def null_error(column: str, place: str, otherwise: str) -> SpecError:
    """Return the error for a null at a place of a table; `otherwise` says how to drop the row."""
    return SpecError(
        f"Elements must not have nulls, but column {column!r} has one in {place}. {_ADVICE}, or {otherwise}."
    )


def fields_of_schema(schema: pa.Schema, conversion: Conversion) -> tuple[ArrowField, ...]:
    """Return the columns of a schema as fields.

    >>> fields = fields_of_schema(pa.schema({"x": pa.int8(), "days": pa.list_(pa.date32())}), Conversion())
    >>> [field.specs() for field in fields]
    [{'x': TensorSpec(shape=(), dtype=int8)}, {'days': TensorSpec(shape=(None,), dtype=datetime64[D])}]

    Raises:
        SpecError: There is no column, two leaves have one name, or no tensor can hold a type.
    """
    if len(schema) == 0:
        raise SpecError("A table must have at least one column, got none. Write it with one.")
    return _fields(list(schema), "", conversion.of_column)


def _fields(fields: Sequence[pa.Field], prefix: str, choice_of: Callable[[str], _Choice]) -> tuple[ArrowField, ...]:
    found = tuple(_field(field, prefix + field.name, choice_of(field.name)) for field in fields)
    names = [name for field in found for name in field.specs()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SpecError(
            f"Columns and their masks must have different names, got two of the name {prefix + twice[0]!r}. Rename one."
        )
    return found


def _field(one: pa.Field, path: str, choice: _Choice) -> ArrowField:
    if pa.types.is_null(one.type) and choice.fill is _NO_VALUE and not choice.masked:
        raise SpecError(
            f"Column {path!r} must hold values, got nulls only. Fill them (from_arrow and from_parquet have fill_null= "
            "and null_masks=), or leave the column out."
        )
    return ArrowField(one.name, path, _value(one.type, path, choice), one.nullable, choice.masked)


def _value(kind: Any, path: str, choice: _Choice) -> ArrowValue:
    if isinstance(kind, pa.FixedShapeTensorType):
        if kind.permutation not in (None, list(range(len(kind.shape)))):
            raise _refused(kind, path)
        return _list(kind.storage_type, tuple(kind.shape), path, choice)
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name == _BOOL8:
        return _leaf(pa.bool_(), path, choice)
    plain = plain_type(kind)
    if plain != kind and isinstance(choice.fill, Mapping) and pa.types.is_map(kind):
        choice = choice.filled(list(choice.fill.items()))
    if pa.types.is_struct(plain) and plain.num_fields:
        return _struct(plain, path, choice)
    if pa.types.is_fixed_size_list(plain):
        return _list(plain, (plain.list_size,), path, choice)
    if any(is_list(plain) for is_list in _LISTS):
        return _list(plain, None, path, choice, pa.types.is_map(kind))
    return _leaf(plain, path, choice)


_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_list_view, pa.types.is_large_list_view)


def _struct(kind: Any, path: str, choice: _Choice) -> ArrowStruct:
    fills = choice.fill if isinstance(choice.fill, Mapping) else None
    names = [kind.field(number).name for number in range(kind.num_fields)]
    unknown = [name for name in fills or {} if name not in names]
    if unknown:
        raise InvalidArgumentError(
            f"fill_null must name fields of column {path!r} ({', '.join(names):.500}), got {unknown[0]!r}."
        )

    def choice_of(name: str) -> _Choice:
        return choice if fills is None else choice.filled(fills.get(name, _NO_VALUE))

    fields = _fields([kind.field(number) for number in range(kind.num_fields)], f"{path}.", choice_of)
    return ArrowStruct(fields, any(field.value.fills for field in fields))


def _list(kind: Any, shape: tuple[int, ...] | None, path: str, choice: _Choice, of_pairs: bool = False) -> ArrowList:
    is_whole = isinstance(choice.fill, list | tuple | np.ndarray)
    items = _value(kind.value_type, path, choice.filled(_NO_VALUE) if is_whole else choice)
    field = ArrowField(ITEM, path, items, kind.value_field.nullable, choice.masked)
    whole = _whole_list(kind, choice.fill, of_pairs) if is_whole else None
    return ArrowList(field, shape, whole, items.fills or whole is not None)


def _whole_list(kind: Any, fill: Any, of_pairs: bool) -> Any:
    """Return a list as an Arrow scalar that can replace nulls; None where the list does not fit."""
    values = fill.tolist() if isinstance(fill, np.ndarray) else list(fill)
    if pa.types.is_fixed_size_list(kind):
        values = np.asarray(values, object).reshape(-1).tolist()
    if of_pairs:
        values = [dict(zip(("keys", "values"), pair, strict=True)) for pair in values]
    try:
        scalar = plain_array(pa.array([values], kind))[0]
        pa.nulls(1, kind).fill_null(scalar)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None
    return scalar


def _leaf(kind: Any, path: str, choice: _Choice) -> ArrowLeaf:
    if pa.types.is_null(kind):
        kind = pa.float32() if choice.fill is _NO_VALUE else _inferred(choice.fill)
    if pa.types.is_decimal(kind):
        kind = _DECIMALS[choice.decimals]
    dtype, read_as, null = _representation(kind, path)
    fill = _NO_VALUE if choice.fill is _NO_VALUE else _fitting(choice.fill, dtype, read_as)
    return ArrowLeaf(dtype, read_as, null if fill is _NO_VALUE else fill, fill is not _NO_VALUE)


def _representation(kind: Any, path: str) -> tuple[np.dtype[Any], pa.DataType, Any]:
    """Return the dtype of a leaf, the Arrow type of its values, and the replacement for nulls."""
    for is_kind, dtype, null in _PLAIN:
        if is_kind(kind):
            return dtype or np.dtype(kind.to_pandas_dtype()), kind, null
    for is_kind, name, unit in _TIMES:
        if is_kind(kind):
            return np.dtype(f"{name}[{unit or kind.unit}]"), pa.int64(), _NAT
    raise _refused(kind, path)


_PLAIN: tuple[tuple[Callable[[Any], bool], np.dtype[Any] | None, Any], ...] = (
    (pa.types.is_string, STR, ""),
    (pa.types.is_large_string, STR, ""),
    (pa.types.is_binary, BYTES, b""),
    (pa.types.is_large_binary, BYTES, b""),
    (pa.types.is_boolean, np.dtype(np.bool_), False),
    (pa.types.is_integer, None, 0),
    (pa.types.is_floating, None, 0),
)
_TIMES: tuple[tuple[Callable[[Any], bool], str, str | None], ...] = (
    (pa.types.is_date32, "datetime64", "D"),
    (pa.types.is_date64, "datetime64", "ms"),
    (pa.types.is_timestamp, "datetime64", None),
    (pa.types.is_time, "timedelta64", None),
    (pa.types.is_duration, "timedelta64", None),
)


def _refused(kind: Any, path: str) -> SpecError:
    return SpecError(
        f"Column {path!r} must hold numbers, bools, text, bytes, dates, times, decimals, tensors that lie row by row, "
        f"or structs, lists and maps of these, got {kind}. Cast the column, or leave it out."
    )


def _inferred(fill: Any) -> Any:
    try:
        return plain_type(pa.scalar(fill).type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return pa.float32()


def _fitting(fill: Any, dtype: np.dtype[Any], kind: pa.DataType) -> Any:
    """Return a fill value as a value of the leaf; _NO_VALUE where it does not fit."""
    try:
        if dtype.kind in "mM":
            return _time(fill, dtype)
        if dtype == STR and isinstance(fill, decimal.Decimal):
            return str(fill)
        found = pa.scalar(float(fill) if kind == pa.float64() and isinstance(fill, decimal.Decimal) else fill, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return _NO_VALUE
    value = found.as_py()
    return _NO_VALUE if dtype.kind in "iu" and value != fill else value


def _time(fill: Any, dtype: np.dtype[Any]) -> Any:
    """Return a date, a time or a duration as a number of units of the leaf."""
    if isinstance(fill, datetime.time):
        fill = datetime.datetime.combine(datetime.date.min, fill) - datetime.datetime.min
    if isinstance(fill, datetime.datetime) and fill.tzinfo is not None:
        fill = fill.astimezone(datetime.UTC).replace(tzinfo=None)
    kinds = (str, datetime.date, np.datetime64) if dtype.kind == "M" else (datetime.timedelta, np.timedelta64)
    if not isinstance(fill, kinds) or fill == "":
        return _NO_VALUE
    return np.asarray(fill).astype(dtype).astype(np.int64).item()
