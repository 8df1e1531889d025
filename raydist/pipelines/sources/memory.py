"""Sources with random access, and data in memory: Dataset.from_tensor_slices and Dataset.from_tensors."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.core.nest import unflatten
from raydist.pipelines.elements.blocks import Block, Column
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec, spec_of_value
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.pipelines.engine.random_access import RandomAccess


class IndexedIterator(OpIterator):
    """An iterator over elements 0, 1, 2, ..., `at_once` of them at most; its state is the next index."""

    def __init__(self, access: RandomAccess, at_once: int = 1 << 62) -> None:
        self._access = access
        self._at_once = at_once
        self._next = 0

    def next_block(self, limit: int) -> Block:
        stop = min(self._next + min(limit, self._at_once), len(self._access))
        if stop <= self._next:
            raise StopIteration
        try:
            block = self._access.read(self._next, stop)
        except Exception:
            if stop - self._next > 1:  # find the element that raises
                return self.next_block((stop - self._next) // 2)
            self._next = stop
            raise
        self._next = stop
        return block

    def state_dict(self) -> IteratorState:
        return {"next": self._next}

    def load_state_dict(self, state: IteratorState) -> None:
        self._next = int(state["next"])


class IndexedSourceOp(SourceOp):
    """A source with random access to its elements."""

    @abstractmethod
    def random_access(self) -> RandomAccess: ...

    def cardinality(self) -> int:
        return len(self.random_access())

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return IndexedIterator(self.random_access())


@dataclass(frozen=True, eq=False)
class MemoryOp(IndexedSourceOp):
    """The rows of one block in memory."""

    pure: ClassVar[bool] = True

    block: Block
    made_by: str

    @classmethod
    def of_slices(cls, tensors: Any) -> MemoryOp:
        """Make one element per entry of the first dimension of every leaf. Arrays are not copied."""
        leaves, structure = flatten_element(tensors)
        columns = [_column(leaf, path) for leaf, path in zip(leaves, structure.paths(), strict=True)]
        if not columns:
            raise InvalidArgumentError(f"from_tensor_slices needs at least one tensor, got {tensors!r}.")
        lengths = {path: len(column) for path, column in zip(structure.paths(), columns, strict=True)}
        if len(set(lengths.values())) > 1:
            raise InvalidArgumentError(f"All tensors must have the same first dimension, got {lengths}.")
        specs = tuple(TensorSpec(column.shape[1:], spec_of_value(column).dtype) for column in columns)
        return cls(Block(structure, specs, tuple(columns), len(columns[0])), "from_tensor_slices")

    @classmethod
    def of_tensors(cls, tensors: Any) -> MemoryOp:
        return cls(block_of_rows([tensors]), "from_tensors")

    @property
    def name(self) -> str:
        return self.made_by

    @property
    def gives_rows(self) -> bool:
        return self.made_by == "from_tensor_slices"

    def element_spec(self) -> Any:
        return unflatten(self.block.structure, self.block.specs)

    def random_access(self) -> RandomAccess:
        return _BlockAccess(self.block)

    @property
    def held(self) -> Block:
        return self.block


def _column(leaf: Any, path: str) -> Column:
    array = as_leaf(leaf)
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        where = f" {path!r}" if path else ""
        raise InvalidArgumentError(
            f"from_tensor_slices needs tensors with a first dimension to slice, got a scalar{where}: {leaf!r:.100}. "
            "Use from_tensors for one element."
        )
    return array


@dataclass(frozen=True, eq=False)
class _BlockAccess(RandomAccess):
    block: Block

    def __len__(self) -> int:
        return self.block.num_rows

    def gather(self, indices: Any) -> Block:
        if is_consecutive(indices):
            return self.read(int(indices[0]), int(indices[-1]) + 1)
        taken = self.block.take(indices)
        return taken.shared() if any(column.dtype.hasobject for column in taken.columns) else taken

    def read(self, start: int, stop: int) -> Block:
        return self.block.slice(start, stop).shared()  # every time: an unpickled array is writable


def is_consecutive(indices: Any) -> bool:
    """Return True for indices n, n + 1, n + 2, ..., at least one."""
    if not len(indices) or indices[-1] - indices[0] != len(indices) - 1:
        return False
    return bool((np.diff(indices) == 1).all())
