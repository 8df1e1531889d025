"""Conversion of the values that a user's function returned to blocks.

Types are checked once per column, not once per value: `set(map(type, values))` costs about 20 ns a value.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import LEAF, NOTHING, Structure, flatten, is_nested
from raydist.core.values import Replicated
from raydist.pipelines.elements.blocks import Block, Column, concat_blocks, object_column
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.leaf_values import PYTHON_DTYPES, as_leaf, is_dataset
from raydist.pipelines.elements.object_leaves import ListLeaf, TensorList, WholeLeaf
from raydist.pipelines.elements.small_floats import is_number
from raydist.pipelines.elements.spec import BYTES, STR, DatasetSpec, TensorSpec, most_specific_common, spec_of_value

_DTYPE = operator.attrgetter("dtype")


class _MixedError(Exception):
    """Raised if the values differ in structure or dtype."""


def block_of_rows(values: Sequence[Any]) -> Block:
    """Return one block of elements that must agree in structure and dtype.

    >>> block_of_rows([(1, 2.0), (3, 4.0)]).columns[1]
    array([2., 4.], dtype=float32)
    """
    try:
        return _uniform_block(values)
    except _MixedError:
        return concat_blocks([_uniform_block([value]) for value in values])


def items_of_rows(values: Sequence[Any]) -> list[Item]:
    """Return blocks of neighbours that agree in structure and dtype; an error in place of each invalid value."""
    if not values:
        return []
    try:
        return [_uniform_block(values)]
    except (_MixedError, SpecError, InvalidArgumentError):
        return _merge([_item(value, index) for index, value in enumerate(values)])


def _item(value: Any, index: int) -> Item:
    try:
        return _uniform_block([value])
    except (SpecError, InvalidArgumentError) as error:
        return ElementError(error, index)


def _merge(items: Sequence[Item]) -> list[Item]:
    merged: list[Item] = []
    run: list[Block] = []
    for item in items:
        if isinstance(item, Block) and (not run or item.signature == run[0].signature):
            run.append(item)
            continue
        merged.extend([concat_blocks(run)] if run else [])
        run = [item] if isinstance(item, Block) else []
        merged.extend([] if isinstance(item, Block) else [item])
    return merged + ([concat_blocks(run)] if run else [])


def _uniform_block(values: Sequence[Any]) -> Block:
    columns: list[Column] = []
    specs: list[TensorSpec] = []
    structure = _split(values, columns, specs)
    if not columns:
        raise SpecError(f"An element must have at least one leaf, got {values[0]!r}.")
    return Block(structure, tuple(specs), tuple(columns), len(values))


def _split(values: Sequence[Any], columns: list[Column], specs: list[TensorSpec]) -> Structure:
    """Append one column per leaf, depth first. Return the structure that all values share."""
    first = values[0]
    kinds = set(map(type, values))
    if first is None:
        if len(kinds) > 1:
            raise _MixedError
        return NOTHING
    if not is_nested(first):
        if len(kinds) > 1 and any(map(is_nested, values)):
            raise _MixedError
        column, spec = stack_leaves(values, kinds)
        columns.append(column)
        specs.append(spec)
        return LEAF
    parts = _tuple_parts(values, kinds) if isinstance(first, tuple) else _named_parts(values)
    kind, keys, groups, shown = parts
    return Structure(kind, keys, tuple(_split(group, columns, specs) for group in groups), shown)


_Parts = tuple[type, tuple[Any, ...], list[Sequence[Any]], tuple[int, ...]]


def _tuple_parts(values: Sequence[Any], kinds: set[type]) -> _Parts:
    kind = type(values[0])
    if len(kinds) > 1 or len(set(map(len, values))) > 1:
        raise _MixedError
    keys = tuple(getattr(kind, "_fields", range(len(values[0]))))
    return kind if hasattr(kind, "_fields") else tuple, keys, list(zip(*values, strict=True)), ()


def _named_parts(values: Sequence[Any]) -> _Parts:
    """Split dicts or dataclasses. The keys and their order are those of :func:`raydist.core.nest.flatten`."""
    first = values[0]
    if isinstance(first, Mapping):
        names = first.keys()
        if not all(isinstance(value, Mapping) and value.keys() == names for value in values):
            raise _MixedError
        shell = flatten(dict.fromkeys(first, 0))[1]
        return dict, shell.keys, [[value[key] for value in values] for key in shell.keys], shell.shown
    if len(set(map(type, values))) > 1:
        raise _MixedError
    keys = tuple(type(first).__dataclass_fields__)
    return type(first), keys, [[getattr(value, key) for value in values] for key in keys], ()


def stack_leaves(values: Sequence[Any], kinds: set[type]) -> tuple[Column, TensorSpec]:
    """Return one column of leaves that share a dtype; dense if they share a shape as well."""
    if len(kinds) == 1:
        (kind,) = kinds
        dtype = PYTHON_DTYPES.get(kind)
        if dtype is not None:
            return _python_column(values, dtype)
        if kind is bytes or kind is str:
            return object_column(values), TensorSpec((), BYTES if kind is bytes else STR)
        if kind is np.ndarray:
            return _stack_arrays(values)
        number = getattr(kind, "dtype", None)
        if issubclass(kind, np.number | np.bool_) and number is not None:
            column = np.array(values)
            return column, TensorSpec((), column.dtype)
    if all(map(is_dataset, kinds)):
        return object_column(values), DatasetSpec()
    if Replicated in kinds or TensorList in kinds:
        return _object_leaves(values, kinds)
    return _stack_any([as_leaf(value) for value in values])


def _object_leaves(values: Sequence[Any], kinds: set[type]) -> tuple[Column, TensorSpec]:
    if len(kinds) > 1:
        raise _MixedError
    if kinds == {Replicated}:
        whole = [WholeLeaf.of(value) for value in values]
        return object_column(whole), _covering([leaf.spec for leaf in whole])
    lists = [ListLeaf.of(value) for value in values]
    return object_column(lists), _covering([leaf.batch_spec for leaf in lists])


def _covering(specs: Sequence[TensorSpec]) -> TensorSpec:
    covering = specs[0]
    for spec in specs[1:]:
        common = most_specific_common(covering, spec)
        if common is None:
            raise _MixedError
        covering = common
    return covering


def _python_column(values: Sequence[Any], dtype: np.dtype[Any]) -> tuple[Column, TensorSpec]:
    try:
        return np.array(values, dtype=dtype), TensorSpec((), dtype)
    except OverflowError:
        raise InvalidArgumentError("A Python int must fit into int64. Use a float or text.") from None


def _stack_arrays(values: Sequence[Any]) -> tuple[Column, TensorSpec]:
    """Stack numbers of one dtype and shape, the common case, without a Python call per array."""
    first = values[0]
    if is_number(first.dtype) and first.dtype.isnative and len(set(map(_DTYPE, values))) == 1:
        try:
            return np.array(values), TensorSpec(first.shape, first.dtype)
        except ValueError:  # the shapes differ
            pass
    return _stack_any([as_leaf(value) for value in values])


def _stack_any(leaves: list[Any]) -> tuple[Column, TensorSpec]:
    if {type(leaf) for leaf in leaves} <= {bytes} or {type(leaf) for leaf in leaves} <= {str}:
        return object_column(leaves), spec_of_value(leaves[0])
    if any(isinstance(leaf, bytes | str) for leaf in leaves):
        raise _MixedError
    if any(leaf.dtype == object for leaf in leaves):
        return _stack_text(leaves)
    if len({leaf.dtype for leaf in leaves}) > 1:
        raise _MixedError
    shapes = {leaf.shape for leaf in leaves}
    if len(shapes) == 1:
        return np.stack(leaves), TensorSpec(leaves[0].shape, leaves[0].dtype)
    # Copies, like stacked ones: the program may write to its arrays later.
    return object_column([leaf.copy() for leaf in leaves]), TensorSpec(_common_shape(shapes), leaves[0].dtype)


def _stack_text(leaves: list[Any]) -> tuple[Column, TensorSpec]:
    if not all(leaf.dtype == object for leaf in leaves):
        raise _MixedError
    dtypes = {spec_of_value(leaf).dtype for leaf in leaves if leaf.size}
    if len(dtypes) > 1:
        raise _MixedError
    dtype = dtypes.pop() if dtypes else STR
    shapes = {leaf.shape for leaf in leaves}
    column = np.stack(leaves) if len(shapes) == 1 else object_column([leaf.copy() for leaf in leaves])
    return column, TensorSpec(_common_shape(shapes), dtype)


def _common_shape(shapes: set[tuple[int, ...]]) -> tuple[int | None, ...] | None:
    ranks = {len(shape) for shape in shapes}
    if len(ranks) > 1:
        return None
    return tuple(dims[0] if len(set(dims)) == 1 else None for dims in zip(*shapes, strict=True))
