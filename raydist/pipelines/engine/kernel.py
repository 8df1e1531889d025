"""Kernels: pure functions of blocks, which a stage runs one after the other on each block.

Every executor calls the same function, :func:`run_stage`. Running it inline, on threads or on a pool of actors changes
no element and no order.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

from raydist.core.errors import SpecError
from raydist.core.exception_utils import LEAVING, as_exception
from raydist.pipelines.elements.blocks import Block, same_kind
from raydist.pipelines.elements.items import ElementError, Item, StageResult


class Kernel(ABC):
    """Picklable work on blocks: a pure function of the block and of the index where the block starts.

    A kernel may run in threads or other processes, and again after a failure.
    """

    label: str
    """Operation and user function, for error notes: "map-1 (train.py:12 augment)"."""

    preserves_count: ClassVar[bool] = True
    """True if n elements in give n elements (or errors) out: then the start of the next kernel is known."""

    element_bytes: int | None = None
    """Bytes of each result, where known beforehand: then the first block need not be small."""

    multiplies: ClassVar[bool] = False
    """True if one element in may give many out: the following operations then form another stage, on smaller blocks."""

    takes_row_ids: ClassVar[bool] = False
    """True if the kernel moves rows without looking at them, so that blocks of row ids need not become values."""

    @property
    def uses_index(self) -> bool:
        """True if results depend on `start` (random numbers): then `start` must be known before the work begins."""
        return False

    @abstractmethod
    def run(self, block: Block, start: int) -> Sequence[Item]:
        """Return the results in order. `start` is the index of the first item among all inputs of this operation.

        Errors of earlier operations count as items: they keep their place.
        """


@final
@dataclass(frozen=True, slots=True)
class StageSpec:
    """A picklable chain of fused kernels; each worker receives it once.

    Attributes:
        name: Operations and epoch, "map-1+filter-2@0.3": unique among the specs of one iterator.
        kernels: The work, in order.
    """

    name: str
    kernels: tuple[Kernel, ...]


def run_stage(
    spec: StageSpec,
    block: Block,
    starts: tuple[int, ...],
    signatures: tuple[str, ...] | None = None,
) -> StageResult:
    """Run the kernels of `spec` on `block`, one after the other.

    Args:
        spec: The stage.
        block: Consecutive elements.
        starts: For each kernel, the index of its first item in this block.
        signatures: For each kernel, the required signature of its results, "" for any; None to require the signature of
            each kernel's first result. Elements with another signature become errors.
    """
    begun_at, begin, begin_cpu = time.time(), time.perf_counter(), time.thread_time()
    items: Sequence[Item] = (block,)
    inputs, found = [], []
    is_numbered = False
    for number, (kernel, start) in enumerate(zip(spec.kernels, starts, strict=True)):
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
    """Return `items` with an error in place of each element of another structure or dtype."""
    if len(items) == 1 and isinstance(items[0], Block) and items[0].signature == signature:
        return items
    kept: list[Item] = []
    last: Block | None = None  # the last block with `signature`
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
    """Return True if two blocks certainly have the same signature. Faster than comparing the signatures."""
    return block.structure is other.structure and block.specs == other.specs


def _rejected(block: Block, signature: str, label: str) -> list[Item]:
    return [ElementError(other_kind_error(label, signature, block.signature)) for _ in range(block.num_rows)]


def other_kind_error(label: str, signature: str, other: str) -> SpecError:
    """Return the error for an element whose structure or dtype differs from the elements before it."""
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
    """Run a kernel on a block; if it fails, run it row by row, so that each error stands in the place of its row."""
    try:
        return kernel.run(block, start)
    except LEAVING:
        raise
    except BaseException as error:
        if block.num_rows == 1:
            return [ElementError(as_exception(error), start)]
    rows = [_run_block(kernel, block.slice(row, row + 1), start + row) for row in range(block.num_rows)]
    return [item for items in rows for item in items]


def join_results(spec: StageSpec, rows: Sequence[StageResult]) -> StageResult:
    """Join the results of the rows of a block, each run with `starts` as if no kernel dropped anything.

    As in a whole block, the first result of a kernel sets the signature: a row of another structure or dtype is an
    error.
    """
    signatures = tuple(_first([row.signatures[number] for row in rows]) for number in range(len(spec.kernels)))
    entered = [0] * len(spec.kernels)
    items: list[Item] = []
    for number, row in enumerate(rows):
        # After a filter, the index of a row is lower than the sender assumed.
        items += [_moved(item, entered[_kernel(item)] - number) for item in _checked(spec, row, signatures)]
        entered = [mine + theirs for mine, theirs in zip(entered, row.inputs, strict=True)]
    busy_s, cpu_s = sum(row.busy_s for row in rows), sum(row.cpu_s for row in rows)
    last, is_numbered = rows[-1], any(row.is_numbered for row in rows)
    return StageResult(tuple(items), tuple(entered), signatures, last.begun_at, busy_s, cpu_s, last.worker, is_numbered)


def _first(signatures: Sequence[str]) -> str:
    return next((signature for signature in signatures if signature), "")


def _kernel(item: Item) -> int:
    return item.kernel if isinstance(item, ElementError) else 0


def _moved(item: Item, distance: int) -> Item:
    if not isinstance(item, ElementError) or item.index is None:
        return item
    return replace(item, index=item.index + distance)


def _checked(spec: StageSpec, row: StageResult, signatures: Sequence[str]) -> Sequence[Item]:
    for kernel, wanted, got in zip(spec.kernels, signatures, row.signatures, strict=True):
        if wanted and got and not same_kind(wanted, got):
            return [ElementError(other_kind_error(kernel.label, wanted, got))]
    return row.items
