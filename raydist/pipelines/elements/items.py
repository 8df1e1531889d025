"""Items: blocks of elements, and errors in place of single elements, as returned by iterators and stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from raydist.core.nest import Structure
from raydist.pipelines.elements.blocks import Block, concat_blocks
from raydist.pipelines.elements.spec import TensorSpec

_SMALL_BYTES = 1 << 16  # a larger block costs more to copy than to hand on alone

IteratorState = dict[str, Any]
"""State of an iterator: JSON-able and small (integers and the states of its inputs)."""


@final
@dataclass(frozen=True, slots=True)
class ElementError:
    """The error of one element, in the element's place among the results of a kernel.

    Attributes:
        error: The exception.
        index: Index of the element among the inputs of the operation that raised it, counted from the kernel's
            `start`; None once the error has been handed out by an iterator.
        kernel: Number of the kernel of the stage that raised it (set by `run_stage`).
    """

    error: Exception
    index: int | None = None
    kernel: int = 0


Item = Block | ElementError
"""Result of an iterator: a block of elements, or an error in place of one element."""


@final
@dataclass(frozen=True, slots=True)
class StageResult:
    """The result of a stage for one block.

    Attributes:
        items: Elements and errors in order.
        inputs: Number of items that entered each kernel.
        signatures: Structure and dtypes of the results of each kernel; "" without results.
        begun_at: Start of the work, in seconds since 1970.
        busy_s: Duration of the work in seconds.
        cpu_s: CPU seconds of the thread for this work.
        worker: Name of the thread or actor.
        is_numbered: True if a kernel made datasets, whose seeds follow from the indices of their elements.
    """

    items: tuple[Item, ...]
    inputs: tuple[int, ...]
    signatures: tuple[str, ...]
    begun_at: float = 0.0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    worker: str = ""
    is_numbered: bool = False


@final
@dataclass(frozen=True, slots=True)
class Groups:
    """The elements of `count` datasets, `size` of each, one dataset after the other."""

    rows: Block
    count: int
    size: int


def size_of(item: Item) -> int:
    """Return the number of elements of a block; 1 for an error."""
    return item.num_rows if isinstance(item, Block) else 1


def count_items(items: Iterable[Item]) -> int:
    """Return the number of elements and errors in `items`."""
    # Runs several times for each large result: calls of `size_of` would take twice as long.
    return sum([item.num_rows if isinstance(item, Block) else 1 for item in items])


def count_bytes(items: Iterable[Item]) -> int:
    """Return the bytes of the blocks in `items`; see :attr:`Block.num_bytes`."""
    return sum([item.num_bytes for item in items if isinstance(item, Block)])


def drop_items(items: Sequence[Item], count: int) -> list[Item]:
    """Return `items` without the first `count` elements or errors."""
    kept: list[Item] = []
    for item in items:
        size = size_of(item)
        if count < size:
            kept.append(item.slice(count, size) if isinstance(item, Block) else item)
        count = max(0, count - size)
    return kept


def keep_items(items: Sequence[Item], count: int) -> list[Item]:
    """Return the first `count` elements or errors of `items`."""
    kept: list[Item] = []
    for item in items:
        if count <= 0:
            break
        kept.append(item.slice(0, count) if isinstance(item, Block) else item)
        count -= size_of(item)
    return kept


def join_items(items: Iterable[Item]) -> list[Item]:
    """Return `items`, with neighbouring small blocks of the same structure and specs joined."""
    joined: list[Item] = []
    for kind, run in itertools.groupby(items, _small_kind):
        if kind is None:
            joined += run
        else:
            joined.append(concat_blocks([item for item in run if isinstance(item, Block)]))
    return joined


def _small_kind(item: Item) -> tuple[Structure, tuple[TensorSpec, ...]] | None:
    """Return the structure and specs of a small block; None for all other items."""
    if isinstance(item, ElementError) or item.num_bytes > _SMALL_BYTES:
        return None
    return item.structure, item.specs
