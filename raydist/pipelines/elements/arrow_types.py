"""What an Arrow type is as a leaf of an element."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from raydist.errors import SpecError
from raydist.pipelines.elements.spec import BYTES, STR, TensorSpec

__all__ = ["is_text", "read_names", "spec_of_schema"]


def spec_of_schema(schema: pa.Schema) -> dict[str, Any]:
    """Nest of TensorSpec of one row: a dict by column name, with a dict inside for every struct.

    >>> spec_of_schema(pa.schema({"x": pa.int8(), "words": pa.list_(pa.string())}))
    {'x': TensorSpec(shape=(), dtype=int8), 'words': TensorSpec(shape=(None,), dtype=str)}

    Raises:
        SpecError: No column, two columns of one name, or a type that no tensor can hold.
    """
    if len(schema) == 0:
        raise SpecError("A table must have at least one column, got none. Write it with one.")
    return _spec_of_fields(list(schema), "")


def _spec_of_fields(fields: list[pa.Field], prefix: str) -> dict[str, Any]:
    names = [field.name for field in fields]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SpecError(f"Columns must have different names, got two of the name {prefix + twice[0]!r}. Rename one.")
    return {field.name: _spec_of_type(field.type, prefix + field.name) for field in fields}


def read_names(fields: Iterable[pa.Field]) -> None:
    """Raise UnicodeDecodeError where a name is no text. Arrow decodes names when they are asked for."""
    for field in fields:
        _ = field.name
        if pa.types.is_struct(field.type):
            read_names(field.type.field(number) for number in range(field.type.num_fields))


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are bytes or str."""
    return _text_dtype(kind) is not None


def _text_dtype(kind: pa.DataType) -> np.dtype[Any] | None:
    if any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)):
        return STR
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
    return BYTES if any(check(kind) for check in checks) else None


def _spec_of_type(kind: pa.DataType, path: str) -> Any:
    text = _text_dtype(kind)
    if text is not None:
        return TensorSpec((), text)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return TensorSpec((), np.dtype(kind.to_pandas_dtype()))
    if pa.types.is_dictionary(kind):
        return _spec_of_type(kind.value_type, path)
    if pa.types.is_struct(kind) and kind.num_fields:
        return _spec_of_fields([kind.field(i) for i in range(kind.num_fields)], f"{path}.")
    if isinstance(kind, pa.FixedShapeTensorType) and kind.permutation in (None, list(range(len(kind.shape)))):
        return TensorSpec(kind.shape, _spec_of_type(kind.value_type, path).dtype)
    if pa.types.is_fixed_size_list(kind):
        return _listed(kind, kind.list_size, path)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _listed(kind, None, path)
    raise SpecError(
        f"Column {path!r} must hold numbers, bools, text, bytes, structs, fixed-shape tensors or lists of them, got "
        f"{kind}. Cast the column, or leave it out."
    )


def _listed(kind: Any, size: int | None, path: str) -> TensorSpec:
    inner = _spec_of_type(kind.value_type, path)
    if not isinstance(inner, TensorSpec) or not inner.is_fixed:
        raise SpecError(
            f"A list in column {path!r} must hold values of one shape, got {kind}. Flatten the inner lists or structs."
        )
    return inner.batched(size)
