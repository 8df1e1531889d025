"""Nested structures: tuples, namedtuples, dicts and dataclasses of leaves.

An element of a dataset, a distributed batch and the result of a step are all *nests*: a :class:`Structure` (the
shape of the nest) and its leaves in a fixed order. A Python list is a leaf (it stands for one tensor), as in tf.data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from raydist.class_memory import remembered_by_class
from raydist.errors import SpecError

__all__ = ["LEAF", "Structure", "flatten", "is_nested", "map_structure", "unflatten"]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """The shape of a nest, without its leaves: hashable, picklable, comparable.

    Attributes:
        kind: None for a leaf, else the type to build: `tuple`, `dict`, a namedtuple or a dataclass.
        keys: Field names or dict keys in leaf order; indices for a plain tuple.
        children: One structure per key.
    """

    kind: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()

    @property
    def num_leaves(self) -> int:
        """Number of leaves: 1 for a leaf itself."""
        return 1 if self.kind is None else sum(child.num_leaves for child in self.children)

    def paths(self, prefix: str = "") -> list[str]:
        """Names of the leaves, for messages and column names: `['image', 'label']`, `['0', '1.x']`, `['']`.

        Args:
            prefix: Stands before every name, with a dot.

        >>> flatten({"x": 1, "y": (2, 3)})[1].paths()
        ['x', 'y.0', 'y.1']
        """
        if self.kind is None:
            return [prefix]
        dot = f"{prefix}." if prefix else ""
        return [p for key, child in zip(self.keys, self.children, strict=True) for p in child.paths(f"{dot}{key}")]

    def __str__(self) -> str:
        return str(unflatten(self, ["*"] * self.num_leaves))


LEAF = Structure()


def is_nested(value: Any) -> bool:
    """Whether `value` has parts (a tuple, dict, namedtuple or dataclass instance).

    >>> is_nested((1, 2)), is_nested([1, 2])
    (True, False)
    """
    cls: Any = type(value)
    return _has_parts(cls)


@remembered_by_class
def _has_parts(kind: Any) -> bool:
    # Asked for every leaf of every batch: abstract classes and `is_dataclass` take a microsecond.
    return issubclass(kind, tuple | Mapping) or dataclasses.is_dataclass(kind)


def _parts(value: Any) -> tuple[type, tuple[Any, ...], Sequence[Any]]:
    """(kind, keys, values) of a nested value. Dict keys are sorted where they can be: {a, b} equals {b, a}."""
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        if fields is not None:
            return type(value), tuple(fields), value
        return tuple, tuple(range(len(value))), value
    if isinstance(value, Mapping):
        try:
            keys = tuple(sorted(value))
        except TypeError:
            keys = tuple(value)
        return dict, keys, [value[key] for key in keys]
    names = tuple(field.name for field in dataclasses.fields(value))
    return type(value), names, [getattr(value, name) for name in names]


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Leaves of a nest in order, and its structure.

    Args:
        value: Anything: what is no tuple, dict, namedtuple or dataclass is a leaf, a list too. The keys of a dict are
            taken in sorted order, where they can be sorted.

    >>> flatten({"x": 1, "y": (2, 3)})[0]
    [1, 2, 3]
    """
    leaves: list[Any] = []
    structure = _flatten_into(value, leaves)
    return leaves, structure


def _flatten_into(value: Any, leaves: list[Any]) -> Structure:
    if not is_nested(value) or getattr(value, "__nest_leaf__", False):
        leaves.append(value)
        return LEAF
    kind, keys, values = _parts(value)
    return Structure(kind, keys, tuple(_flatten_into(item, leaves) for item in values))


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """The nest of `structure` with these leaves: the inverse of :func:`flatten`.

    Args:
        structure: What `flatten` gave.
        leaves: As many as it has.

    Raises:
        SpecError: There are more.

    >>> leaves, structure = flatten(({"x": 1}, 2))
    >>> unflatten(structure, leaves)
    ({'x': 1}, 2)
    """
    value, used = _build(structure, leaves, 0)
    if used != len(leaves):
        raise SpecError(f"A structure with {used} leaves was given {len(leaves)} leaves.")
    return value


def _build(structure: Structure, leaves: Sequence[Any], at: int) -> tuple[Any, int]:
    if structure.kind is None:
        return leaves[at], at + 1
    values = []
    for child in structure.children:
        value, at = _build(child, leaves, at)
        values.append(value)
    if structure.kind is tuple:
        return tuple(values), at
    if structure.kind is dict:
        return dict(zip(structure.keys, values, strict=True)), at
    return structure.kind(**dict(zip(structure.keys, values, strict=True))), at


def map_structure(fn: Callable[..., Any], *nests: Any) -> Any:
    """Apply `fn` leaf by leaf to nests of one structure.

    Args:
        fn: Gets one leaf of each nest.
        nests: At least one.

    Raises:
        SpecError: Their structures differ.

    >>> map_structure(lambda a, b: a + b, (1, {"x": 2}), (10, {"x": 20}))
    (11, {'x': 22})
    """
    leaves, structure = flatten(nests[0])
    columns = [leaves]
    for other in nests[1:]:
        more, found = flatten(other)
        if found != structure:
            raise SpecError(f"All nests must have one structure: {structure} and {found} differ.")
        columns.append(more)
    return unflatten(structure, [fn(*row) for row in zip(*columns, strict=True)])
