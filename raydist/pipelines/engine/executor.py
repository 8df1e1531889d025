"""The executor port: where the work of a stage is done.

A stage is a chain of fused kernels. Every executor calls the same pure function, :func:`run_stage`, on a block; whether
it does so at once, on threads or on a pool of actors changes no element and no order.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from raydist.errors import SpecError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.engine.op import ElementError, Item, IterContext, Kernel
from raydist.pipelines.metering.meters import Meter, Place

if TYPE_CHECKING:
    from raydist.pipelines.autotune.tuned_prefetch import TunedPrefetch

__all__ = [
    "Executor",
    "InlineExecutor",
    "Pending",
    "StageResult",
    "StageSpec",
    "other_kind_error",
    "reject_others",
    "run_stage",
]


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
    """

    items: tuple[Item, ...]
    inputs: tuple[int, ...]
    signatures: tuple[str, ...]
    begun_at: float = 0.0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    worker: str = ""


def run_stage(
    spec: StageSpec, block: Block, starts: tuple[int, ...], signatures: tuple[str, ...] | None = None
) -> StageResult:
    """Run the kernels of `spec` on `block`, one after the other.

    Args:
        spec: The stage.
        block: Consecutive elements.
        starts: For each kernel, the index of the first item that it gets here.
        signatures: For each kernel, what its results must be, "" for anything; None to take each one's first result as
            the measure. Other elements become errors.
    """
    begun_at, begin, begin_cpu = time.time(), time.perf_counter(), time.thread_time()
    items: Sequence[Item] = (block,)
    inputs, found = [], []
    for number, (kernel, start) in enumerate(zip(spec.kernels, starts, strict=True)):
        items, entered = _run_kernel(kernel, number, items, start)
        signature = (signatures[number] if signatures else "") or _first_signature(items)
        items = reject_others(items, signature, kernel.label)
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
    )


def _first_signature(items: Sequence[Item]) -> str:
    return next((item.signature for item in items if isinstance(item, Block)), "")


def reject_others(items: Sequence[Item], signature: str, label: str) -> Sequence[Item]:
    """Errors in the place of elements of another structure or dtype."""
    if len(items) == 1 and isinstance(items[0], Block) and items[0].signature == signature:
        return items
    kept: list[Item] = []
    for item in items:
        if isinstance(item, ElementError) or item.signature == signature:
            kept.append(item)
        else:
            kept.extend(_rejected(item, signature, label))
    return kept


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
        for made in _run_block(kernel, item, at):
            results.append(replace(made, kernel=number) if isinstance(made, ElementError) else made)
        at += item.num_rows
    return results, at - start


def _run_block(kernel: Kernel, block: Block, start: int) -> Sequence[Item]:
    """A kernel that fails as a whole is run row by row, so that the error stands where it belongs."""
    try:
        return kernel.run(block, start)
    except Exception as error:
        if block.num_rows == 1:
            return [ElementError(error, start)]
    rows = [_run_block(kernel, block.slice(row, row + 1), start + row) for row in range(block.num_rows)]
    return [item for items in rows for item in items]


class Pending(ABC):
    """The coming result of one submitted block."""

    @abstractmethod
    def result(self) -> StageResult:
        """The result. Waits, up to the executor's limit; raises DeadlineExceededError or UnavailableError."""

    def done(self) -> bool:
        """Whether `result` would answer at once."""
        return True

    def cancel(self) -> None:  # noqa: B027 - what is done at once cannot be given up
        """Nobody wants the result any more: who waits for it gets a CancelledError."""


class Executor(ABC):
    """Runs stages on blocks.

    Attributes:
        window: Blocks worth having in flight; 1 for work that is done at once.
        place: Where the work is done; "inline" is the caller's thread.
        num_workers: How many blocks are worked on at a time.
        least_rows: Elements that a block should have, so that the work on it is worth more than its way.
    """

    window: int
    place: Place = "inline"
    num_workers: int = 1
    least_rows: int = 1

    def for_stage(self, meter: Meter, ctx: IterContext) -> Executor:
        """What runs one stage whose parallelism was left to raydist; this executor closes it."""
        return self

    def for_prefetch(self, meter: Meter, ctx: IterContext) -> TunedPrefetch | None:
        """What decides when a pipeline is read ahead that nobody asked to; None: never."""
        return None

    @abstractmethod
    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        """Begin `run_stage(spec, block, starts)`."""

    @abstractmethod
    def close(self) -> None:
        """Give up what has not begun, and stop. May be called twice."""


@final
@dataclass(frozen=True, slots=True)
class _Ready(Pending):
    value: StageResult

    def result(self) -> StageResult:
        return self.value


@final
class InlineExecutor(Executor):
    """Works at once, in the caller's thread."""

    def __init__(self) -> None:
        self.window = 1

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        return _Ready(run_stage(spec, block, starts))

    def close(self) -> None:
        """Nothing to stop."""
