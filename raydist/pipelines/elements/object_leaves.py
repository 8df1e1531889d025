"""Leaves of batches that are not arrays of rows: lists of tensors, and values that go whole to every replica.

A block holds such a leaf as an object in a column of dtype object, with an `ObjectSpec`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from raydist.core.errors import SpecError
from raydist.core.values import Replicated
from raydist.pipelines.elements.leaf_values import as_leaf, is_torch
from raydist.pipelines.elements.small_floats import array_of_tensor, tensor_of_array
from raydist.pipelines.elements.spec import RaggedSpec, ReplicatedSpec, TensorSpec, most_specific_common, spec_of_value

FromNumpy = Callable[[Any], Any] | None
"""torch.from_numpy for users of tensors; None for users of numpy arrays."""


class ObjectLeaf(ABC):
    """A leaf of a batch that is not an array of rows."""

    @property
    @abstractmethod
    def num_rows(self) -> int | None:
        """Number of elements that the split rule cuts; None for a leaf that is not cut."""

    @abstractmethod
    def cut(self, start: int, stop: int) -> Self:
        """Return the part for the elements `start` .. `stop` - 1 of the batch."""

    @abstractmethod
    def for_functions(self) -> Any:
        """Return the value for a function of a transformation."""

    @abstractmethod
    def for_users(self, from_numpy: FromNumpy) -> Any:
        """Return the value that an iterator hands out, with private arrays."""

    @abstractmethod
    def in_pieces(self) -> Box:
        """Return the leaf as a part of one replica's piece."""


@final
class TensorList(list[Any]):
    """A list of the arrays of a `ragged_batch`, for functions. A TensorList that a function returns stays a list."""

    def __init__(self, values: Iterable[Any], spec: TensorSpec) -> None:
        super().__init__(values)
        self.spec = spec


@final
@dataclass(frozen=True, slots=True, eq=False)
class ListLeaf(ObjectLeaf):
    """A list of tensors, one for each element of a batch."""

    entries: Sequence[Any]
    spec: TensorSpec

    @classmethod
    def of(cls, values: TensorList) -> ListLeaf:
        """Return the leaf of a list that a function returned."""
        entries = [_own(as_leaf(value)) for value in values]
        spec = values.spec
        for number, entry in enumerate(entries):
            common = most_specific_common(spec_of_value(entry) if number == 0 else spec, spec_of_value(entry))
            if common is None:
                raise SpecError(f"A list of tensors must hold one dtype, got {spec} and then {spec_of_value(entry)}.")
            spec = common
        return cls(entries, spec)

    @property
    def batch_spec(self) -> RaggedSpec:
        """The spec of the whole leaf."""
        return RaggedSpec(None if self.spec.shape is None else (len(self.entries), *self.spec.shape), self.spec.dtype)

    @property
    def num_rows(self) -> int:
        return len(self.entries)

    def cut(self, start: int, stop: int) -> ListLeaf:
        return ListLeaf(self.entries[start:stop], self.spec)

    def for_functions(self) -> TensorList:
        return TensorList((_own(entry) for entry in self.entries), self.spec)

    def for_users(self, from_numpy: FromNumpy) -> list[Any]:
        return [handed_out(entry, from_numpy) for entry in self.entries]

    def in_pieces(self) -> Box:
        return Box(list(self.entries), "rows")


@final
@dataclass(frozen=True, slots=True, eq=False)
class WholeLeaf(ObjectLeaf):
    """A value that the user marked with `rd.Replicated`."""

    value: Any

    @classmethod
    def of(cls, value: Replicated) -> WholeLeaf:
        """Return the leaf for a user's value. Raises SpecError if no leaf can hold the value."""
        return cls(_own(as_leaf(value.value)))

    @property
    def spec(self) -> ReplicatedSpec:
        """The spec of the value."""
        found = spec_of_value(self.value)
        return ReplicatedSpec(found.shape, found.dtype)

    @property
    def num_rows(self) -> None:
        return None

    def cut(self, start: int, stop: int) -> WholeLeaf:
        return self

    def for_functions(self) -> Replicated:
        return Replicated(self.value)

    def for_users(self, from_numpy: FromNumpy) -> Any:
        return handed_out(self.value, from_numpy)

    def in_pieces(self) -> Box:
        return Box(self.value, "whole")


def _own(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


@final
@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """A leaf of one replica's piece that is not an array of rows.

    Attributes:
        value: A list, a tensor, or any nest, with numpy arrays in place of tensors.
        kind: "rows": a list with an entry for each element; "whole": a value for every replica; "made": the result of a
            `collate` function, which cannot be cut.
    """

    value: Any
    kind: str

    def first(self, num_rows: int) -> Box:
        """Return the part of the first `num_rows` elements; the whole if it cannot be cut and `num_rows` is not 0."""
        if self.kind == "rows":
            return Box(self.value[:num_rows], "rows")
        return self if num_rows or self.kind == "whole" else Box(emptied(self.value), "made")

    @property
    def nbytes(self) -> int:
        """Approximate number of bytes of the arrays and texts."""
        sizes: list[int] = []
        map_parts(lambda part: sizes.append(_num_bytes(part)), self.value)
        return sum(sizes)


def _num_bytes(part: Any) -> int:
    return len(part) if isinstance(part, bytes | str) else int(getattr(part, "nbytes", 8))


def boxed(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array without dimensions that holds the object `value`: pieces consist of arrays."""
    array = np.empty((), dtype=object)
    array[()] = value
    return array


def handed_out(value: Any, from_numpy: FromNumpy) -> Any:
    """Return `value` with private arrays: tensors, or numpy arrays if `from_numpy` is None. Other objects stay."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.generic):
            return leaf if from_numpy is None else tensor_of_array(np.array(leaf), from_numpy)
        if not isinstance(leaf, np.ndarray):
            return array_of_tensor(leaf.detach().cpu()) if from_numpy is None and is_torch(leaf) else leaf
        return leaf.copy() if from_numpy is None or leaf.dtype == object else tensor_of_array(leaf.copy(), from_numpy)

    return map_parts(convert, value)


def emptied(value: Any) -> Any:
    """Return `value` as for a batch without elements: tensors without rows, empty lists and tuples."""
    if isinstance(value, list | tuple):
        return type(value)()
    if isinstance(value, np.ndarray) or is_torch(value):
        return value.reshape(value.shape or 1)[:0]
    return value


def without_tensors(value: Any) -> Any:
    """Return `value` with numpy arrays in place of tensors, without copies where possible."""
    return map_parts(lambda part: array_of_tensor(part.detach().cpu()) if is_torch(part) else part, value)


def map_parts(fn: Callable[[Any], Any], value: Any) -> Any:
    """Apply `fn` to everything that is not a list, tuple or mapping, at any depth.

    >>> map_parts(abs, [(-1, -2), {"x": -3}])
    [(1, 2), {'x': 3}]
    """
    if isinstance(value, tuple):
        parts = [map_parts(fn, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [map_parts(fn, part) for part in value]
    if isinstance(value, Mapping):
        return {key: map_parts(fn, part) for key, part in value.items()}
    return fn(value)
