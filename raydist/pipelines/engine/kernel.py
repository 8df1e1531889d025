"""The work of a stage: kernels, pure functions of blocks, run one after the other on one block.

Every executor calls the same function, :func:`run_stage`; whether it does so at once, on threads or on a pool of actors
changes no element and no order.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

from raydist.errors import SpecError
from raydist.foreign_errors import LEAVING, as_exception
from raydist.pipelines.elements.blocks import Block, same_kind
from raydist.pipelines.elements.column_memory import MakeColumn, columns_made_by
from raydist.pipelines.elements.items import ElementError, Item, StageResult

__all__ = ["Kernel", "StageSpec", "other_kind_error", "reject_others", "run_stage"]


class Kernel(ABC):
    """Work on blocks that needs nothing but the block and where it starts: a pure function, picklable.

    It may run in threads or other processes, and again after a failure.
    """

    label: str
    """Operation and user function, for error notes: "map-1 (train.py:12 augment)"."""

    preserves_count: ClassVar[bool] = True
    """Whether n elements in are n elements (or errors) out, so that the next kernel's start is known beforehand."""

    element_bytes: int | None = None
    """Bytes of each element out, where that is known beforehand: then the first block need not be a small one."""

    multiplies: ClassVar[bool] = False
    """Whether one element in may be very many out, so that what follows is a stage of its own, on smaller blocks."""

    @property
    @abstractmethod
    def uses_index(self) -> bool:
        """Whether results depend on `start` (random numbers): then `start` must be known before the work begins."""

    @abstractmethod
    def run(self, block: Block, start: int) -> Sequence[Item]:
        """Results in order. `start` is the index of the block's first item among all inputs of this operation.

        Errors of earlier operations count as items: they keep their place and pass by.
        """


@final
@dataclass(frozen=True, slots=True)
class StageSpec:
    """Fused kernels, picklable; sent to a worker once.

    Attributes:
        name: Its operations and epoch, "map-1+filter-2@0.3": unique among the specs of one iterator.
        kernels: The work, in order.
    """

    name: str
    kernels: tuple[Kernel, ...]


def run_stage(
    spec: StageSpec,
    block: Block,
    starts: tuple[int, ...],
    signatures: tuple[str, ...] | None = None,
    make_column: MakeColumn | None = None,
) -> StageResult:
    """Run the kernels of `spec` on `block`, one after the other.

    Args:
        spec: The stage.
        block: Consecutive elements.
        starts: For each kernel, the index of the first item that it gets here.
        signatures: For each kernel, what its results must be, "" for anything; None to take each one's first result as
            the measure. Other elements become errors.
        make_column: Where large columns of the result may be made.
    """
    begun_at, begin, begin_cpu = time.time(), time.perf_counter(), time.thread_time()
    items: Sequence[Item] = (block,)
    inputs, found = [], []
    is_numbered, last = False, len(spec.kernels) - 1
    for number, (kernel, start) in enumerate(zip(spec.kernels, starts, strict=True)):
        with columns_made_by(make_column if number == last else None):
            items, entered = _run_kernel(kernel, number, items, start)
        signature = (signatures[number] if signatures else "") or _first_signature(items)
        items = reject_others(items, signature, kernel.label)
        is_numbered = is_numbered or any(isinstance(item, Block) and item.holds_datasets for item in items)
        inputs.append(entered)
        found.append(signature)
    return StageResult(
        tuple(items),
        tuple(inputs),
        tuple(found),
        begun_at=begun_at,
        busy_s=time.perf_counter() - begin,
        cpu_s=time.thread_time() - begin_cpu,
        worker=threading.current_thread().name,
        is_numbered=is_numbered,
    )


def _first_signature(items: Sequence[Item]) -> str:
    return next((item.signature for item in items if isinstance(item, Block)), "")


def reject_others(items: Sequence[Item], signature: str, label: str) -> Sequence[Item]:
    """Errors in the place of elements of another structure or dtype."""
    if len(items) == 1 and isinstance(items[0], Block) and items[0].signature == signature:
        return items
    kept: list[Item] = []
    last: Block | None = None  # that had it
    for item in items:
        if isinstance(item, ElementError):
            kept.append(item)
        elif (last is not None and _are_alike(item, last)) or same_kind(signature, item.signature):
            kept.append(item)
            last = item
        else:
            kept.extend(_rejected(item, signature, label))
    return kept


def _are_alike(block: Block, other: Block) -> bool:
    """Whether two blocks have one signature for sure. Quicker than to ask for both."""
    return block.structure is other.structure and block.specs == other.specs


def _rejected(block: Block, signature: str, label: str) -> list[Item]:
    return [ElementError(other_kind_error(label, signature, block.signature)) for _ in range(block.num_rows)]


def other_kind_error(label: str, signature: str, other: str) -> SpecError:
    """The error for an element of another structure or dtype than those before it."""
    return SpecError(
        f"All elements must have one structure and dtype: {label} gave {signature}, and now {other}. Let it return the "
        "same for every element."
    )


def _run_kernel(kernel: Kernel, number: int, items: Sequence[Item], start: int) -> tuple[list[Item], int]:
    results: list[Item] = []
    at = start
    for item in items:
        if isinstance(item, ElementError):
            results.append(item)
            at += 1
            continue
        made = _run_block(kernel, item, at)
        results += [each if isinstance(each, Block) else replace(each, kernel=number) for each in made]
        at += item.num_rows
    return results, at - start


def _run_block(kernel: Kernel, block: Block, start: int) -> Sequence[Item]:
    """A kernel that fails as a whole is run row by row, so that the error stands where it belongs."""
    try:
        return kernel.run(block, start)
    except LEAVING:
        raise
    except BaseException as error:
        if block.num_rows == 1:
            return [ElementError(as_exception(error), start)]
    rows = [_run_block(kernel, block.slice(row, row + 1), start + row) for row in range(block.num_rows)]
    return [item for items in rows for item in items]
