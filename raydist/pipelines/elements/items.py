"""What iterators hand out and stages give back: blocks of elements, and errors in the place of single elements."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

from raydist.nest import Structure
from raydist.pipelines.elements.blocks import Block, concat_blocks
from raydist.pipelines.elements.spec import TensorSpec

__all__ = [
    "ElementError",
    "Groups",
    "Item",
    "StageResult",
    "IteratorState",
    "count_bytes",
    "count_items",
    "drop_items",
    "join_items",
    "keep_items",
    "size_of",
]

_SMALL_BYTES = 1 << 16  # a block of more costs more to copy than to hand on by itself

IteratorState = dict[str, Any]
"""State of an iterator: JSON-able, small (integers and the states of its inputs)."""


@final
@dataclass(frozen=True, slots=True)
class ElementError:
    """The error of one element, standing at its place among the results of a kernel.

    Attributes:
        error: What was raised.
        index: Index of the element among the inputs of the operation that raised it, counted from the kernel's
            `start`; None once the error has been handed out by an iterator.
        kernel: Which kernel of its stage raised it (set by `run_stage`).
    """

    error: Exception
    index: int | None = None
    kernel: int = 0


Item = Block | ElementError
"""What an iterator hands out: a block of elements, or an error that takes the place of one element."""


@final
@dataclass(frozen=True, slots=True)
class StageResult:
    """What a stage made of one block.

    Attributes:
        items: Elements and errors in order.
        inputs: Items that entered each kernel.
        signatures: Structure and dtypes of what each kernel made; "" where it made nothing.
        begun_at: When the work began, in seconds since 1970.
        busy_s: Seconds that it took.
        cpu_s: CPU seconds that its thread used for it.
        worker: Which thread or actor did it.
        is_numbered: Whether a kernel made datasets: their seeds follow from the numbers of their elements.
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
    """Elements of a block; 1 for an error."""
    return item.num_rows if isinstance(item, Block) else 1


def count_items(items: Iterable[Item]) -> int:
    """Elements and errors in `items`."""
    # Asked several times for each large result: a call of `size_of` would take twice as long.
    return sum([item.num_rows if isinstance(item, Block) else 1 for item in items])


def count_bytes(items: Iterable[Item]) -> int:
    """Bytes of the blocks in `items`; see :attr:`Block.num_bytes`."""
    return sum([item.num_bytes for item in items if isinstance(item, Block)])


def drop_items(items: Sequence[Item], count: int) -> list[Item]:
    """`items` without their first `count` elements or errors."""
    kept: list[Item] = []
    for item in items:
        size = size_of(item)
        if count < size:
            kept.append(item.slice(count, size) if isinstance(item, Block) else item)
        count = max(0, count - size)
    return kept


def keep_items(items: Sequence[Item], count: int) -> list[Item]:
    """The first `count` elements or errors of `items`."""
    kept: list[Item] = []
    for item in items:
        if count <= 0:
            break
        kept.append(item.slice(0, count) if isinstance(item, Block) else item)
        count -= size_of(item)
    return kept


def join_items(items: Iterable[Item]) -> list[Item]:
    """`items` with neighbouring small blocks of one kind as one block."""
    joined: list[Item] = []
    for kind, run in itertools.groupby(items, _small_kind):
        if kind is None:
            joined += run
        else:
            joined.append(concat_blocks([item for item in run if isinstance(item, Block)]))
    return joined


def _small_kind(item: Item) -> tuple[Structure, tuple[TensorSpec, ...]] | None:
    """What blocks that are worth joining share; None for all else."""
    if isinstance(item, ElementError) or item.num_bytes > _SMALL_BYTES:
        return None
    return item.structure, item.specs
