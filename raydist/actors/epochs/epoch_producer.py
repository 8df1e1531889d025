"""One epoch over a distributed dataset: a thread makes steps while credits last, and readers take them by long poll.

Steps are added to an open group, which is stored and offered once it is full or a reader has no other work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np

from raydist.actors.epochs.batch_group import MadeStep, OpenGroup
from raydist.actors.epochs.served_epoch import Poll, QueueEntry, ServedEpoch
from raydist.actors.portable_errors import pack_error
from raydist.actors.workers.result_recipes import node_of
from raydist.core.errors import CancelledError, DeadlineExceededError, UnavailableError
from raydist.core.exception_utils import LEAVING
from raydist.core.nest import flatten
from raydist.pipelines.elements.blocks import Block, concat_blocks
from raydist.pipelines.elements.columns import Column, RemoteColumn, concat_columns
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.executor import Pending
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.engine.shuffle_buffer import CopyRows
from raydist.pipelines.metering.stats import PipelineStats
from raydist.pipelines.run.steps import StepSource

if TYPE_CHECKING:
    from raydist.actors.workers.pool import ActorExecutor


_MOST_TIMES = 2.0


def is_worth_a_copy(column: RemoteColumn) -> bool:
    """Return True if the blocks with these rows are more than twice as large as the rows."""
    named = [column.stored[number] for number in np.unique(column.numbers).tolist()]
    return sum(each.row_bytes * each.shape[0] for each in named) > _MOST_TIMES * column.nbytes


def _rows_by_node(column: RemoteColumn) -> dict[str, np.ndarray]:
    """Return the rows of a column by the node of their blocks, in order."""
    numbers, kinds = np.unique(column.numbers, return_inverse=True)
    nodes = [node_of(column.stored[number]) for number in numbers.tolist()]
    names = list(dict.fromkeys(nodes))
    of_rows = np.array([names.index(node) for node in nodes])[kinds]
    return {name: np.flatnonzero(of_rows == index) for index, name in enumerate(names)}


@final
class Assembly:
    """The assembly of batches for replicas on several nodes: input workers copy rows on the nodes that store them.

    A shuffled batch has rows of many blocks. If each replica mapped these blocks, they would all travel to every node.
    So an input worker on the node of some blocks copies the rows for one replica into a new block, and only that
    travels.

    Args:
        pool: Runs the copies.
        name: Name of the epoch, for messages.
    """

    def __init__(self, pool: ActorExecutor, name: str) -> None:
        self._pool = pool
        self._spec = StageSpec("assembly", (CopyRows(f"the assembly of batches of {name}"),))

    def begin(self, columns: Sequence[Column]) -> Callable[[], list[Column]]:
        """Start to copy columns of equal length that hold row ids, where that is worth it.

        Returns:
            A function that waits for the copies and returns the columns.
        """
        places = [place for place, column in enumerate(columns) if _may_be_copied(column)]
        if not places:
            return lambda: list(columns)
        rows = [cast(RemoteColumn, columns[place]) for place in places]
        largest = max(rows, key=lambda column: column.nbytes)
        by_node = _rows_by_node(largest)
        underway = [
            self._pool.submit_on(node, self._spec, _block([c[at] for c in rows]), (0,)) for node, at in by_node.items()
        ]
        order = np.argsort(np.concatenate(list(by_node.values())))

        def finish() -> list[Column]:
            made = [_copied(work) for work in underway]
            found = list(columns)
            for index, place in enumerate(places):
                found[place] = concat_columns([block.columns[index] for block in made])[order]
            return found

        return finish


def _may_be_copied(column: Column | RemoteColumn) -> bool:
    return isinstance(column, RemoteColumn) and column.ids.ndim == 1 and len(column) > 0 and is_worth_a_copy(column)


def _block(columns: Sequence[RemoteColumn]) -> Block:
    specs = tuple(TensorSpec(column.row_shapes[0], column.dtype) for column in columns)
    return Block(flatten(specs)[1], specs, tuple(cast(Sequence[Column], columns)), len(columns[0]))


def _copied(work: Pending) -> Block:
    """Return the copied rows: several blocks where a worker died meanwhile."""
    blocks = []
    for item in work.result().items:
        if not isinstance(item, Block):
            raise item.error
        blocks.append(item)
    return concat_blocks(blocks)


_GROUP_BYTES = 32 << 20  # of one replica; with 16 MB, a step of 8 MB took 3.5 ms instead of 2.8
_GROUP_S = 0.5  # work for the reader in one group
_MOST_STEPS = 128  # in one group
_GROUPS = 3  # one in use, one ready, one being made


@final
@dataclass(frozen=True, slots=True)
class Credits:
    """The limits for the unacknowledged steps of an epoch.

    Attributes:
        capacity: Number of unacknowledged steps that are always allowed, however large.
        spare_bytes: Limit in bytes for steps beyond `capacity`, while readers are fast; 0 for no such steps.
        group_bytes: Limit for one replica's piece of a group; a larger step gets its own group.
    """

    capacity: int
    spare_bytes: int = 0
    group_bytes: int = _GROUP_BYTES

    @classmethod
    def within(cls, store_bytes: int | None, capacity: int, num_replicas: int, *, only_capacity: bool) -> Credits:
        """Return credits that use at most an eighth of an object store for steps beyond `capacity`.

        Args:
            store_bytes: Size of the object store; None if unknown.
            capacity: See the class.
            num_replicas: Number of replicas that share a step.
            only_capacity: True to allow no steps beyond `capacity`.
        """
        spare = _GROUPS * num_replicas * _GROUP_BYTES
        if store_bytes is not None:
            spare = min(spare, store_bytes // 8)
        return cls(capacity, 0 if only_capacity else spare, spare // (_GROUPS * num_replicas))

    def group_steps(self, pace_s: float | None) -> int:
        """Return the most steps in one group, for a reader that takes `pace_s` seconds per step (None: unknown)."""
        few = max(1, self.capacity // 2)  # the reader holds one group while the next one is made
        if not self.spare_bytes or pace_s is None:
            return few
        return max(few, min(_MOST_STEPS, int(_GROUP_S / max(pace_s, 1e-6))))

    def allow(self, *, ahead: int, held_bytes: int, step_bytes: int, pace_s: float | None) -> bool:
        """Return True if the epoch may make one more step.

        Args:
            ahead: Number of unacknowledged steps.
            held_bytes: Bytes of all kept steps.
            step_bytes: Bytes of the last step.
            pace_s: See `group_steps`.
        """
        if ahead < self.capacity or not self.spare_bytes:
            return ahead < self.capacity
        quick = pace_s is not None and ahead < _GROUPS * self.group_steps(pace_s)
        return quick and held_bytes + step_bytes <= self.spare_bytes


# Errors that end the epoch: a worker is gone or stuck, and every later element would fail in the same way.
_FATAL = (UnavailableError, DeadlineExceededError, CancelledError)

_LINGER_S = 0.001  # a step waits this long for others even if a reader is idle: storing and sending takes as long
_READY_LINGER_S = 0.02  # while the next step is ready: a call of a reader costs as much as many steps
_HELD_S = 0.05  # the longest time that a step is held back for a reader that reports enough work


def _nothing() -> None:
    """Do nothing: the default of `on_end`."""


@final
class EpochProducer(ServedEpoch):
    """An epoch whose thread makes steps, as far ahead of the slowest reader as the credits allow. Thread-safe.

    `put` stores a piece and returns a reference; `where` is appended to notes on errors; `assembly` copies rows for
    replicas on several nodes; the thread calls `on_end` once, when the source is closed.
    """

    def __init__(
        self,
        source: StepSource,
        put: Callable[[Any], Any],
        *,
        num_replicas: int,
        credit: Credits,
        zero_copy: bool,
        label: str,
        where: str = "",
        assembly: Assembly | None = None,
        on_end: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__(num_replicas, source.state_dict(), label)
        self._source = source
        self._put = put
        self._credit = credit
        self._zero_copy = zero_copy
        self._where = where
        self._begin_assembly = None if assembly is None else assembly.begin
        self._on_end = on_end
        self._ended = False
        self._storing = threading.Lock()  # acquired before `_changed`; groups are stored one at a time
        self._open = OpenGroup(credit.group_bytes)
        self._moving = OpenGroup(credit.group_bytes)  # closed, and being stored
        self._open_since = 0.0
        self._next_is_ready = False
        self._step_bytes = 0
        self._hungry: list[float] = []  # for each pending poll, the time at which the reader runs out of work
        self._pace_s: float | None = None

    def _run(self) -> None:
        try:
            while self._await_credit():
                self._make_place()
        except BaseException as error:  # not an element's error: without an answer, readers would wait
            self._store_open()
            self._fail(error)
        finally:
            self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._source.close()
            self._on_end()

    def _acknowledged(self) -> None:
        """Do nothing: the caller notifies `_changed`, which wakes a wait for credits."""

    def _await_credit(self) -> bool:
        """Block until one more step may be made; return False if the epoch is finished."""
        with self._changed:
            if self._may_go_on():
                return not self._queues.finished
            others_are_ready = self._queues.num_entries > 1
        if not others_are_ready:  # the open group cannot grow now, and a reader soon needs it
            self._store_open()
        with self._changed:
            self._changed.wait_for(self._may_go_on)
            return not self._queues.finished

    def _may_go_on(self) -> bool:
        return self._queues.finished or self._credit.allow(
            ahead=self._queues.num_ahead + self._moving.num_steps + self._open.num_steps,
            held_bytes=self._queues.num_bytes + self._moving.num_bytes + self._open.num_bytes,
            step_bytes=self._step_bytes,
            pace_s=self._pace_s,
        )

    def _make_place(self) -> None:
        began = time.monotonic()
        step = self._source.step
        try:
            cuts = self._source.next_step()
        except StopIteration:
            self._store_open()
            state, stats = self._source.state_dict(), self._source.stats()
            self._end()  # before readers see the end, so that their next epoch finds the resources free
            self._offer((state,), last=True, stats=stats)
        except BaseException as error:
            self._store_open()
            packed = pack_error(error, f"In {self._label}, step {step}{self._where}.")
            last = isinstance(error, (*_FATAL, *LEAVING))
            state = self._source.state_dict()
            if last:
                self._end()
            self._offer((state,), error=packed, last=last)
        else:
            made = MadeStep(step, cuts, self._source.structure, self._source.state_dict())
            self._gather(made, time.monotonic() - began)

    def _gather(self, step: MadeStep, took_s: float) -> None:
        """Add a step to the open group, and store the group if it is full or due."""
        kind, sizes = step.kind(), step.sizes()
        with self._changed:
            fits = self._open.accepts(kind, sizes)
        if not fits:
            self._store_open()
        with self._changed:
            if not self._open.num_steps:
                self._open_since = time.monotonic()
            self._open.add(step, kind, sizes)
            self._step_bytes = sum(sizes)
            self._next_is_ready = self._source.has_ready()
            full = self._open.is_full or self._open.num_steps >= self._credit.group_steps(self._pace_s)
            due_s = min(self._hungry, default=float("inf"))
            next_s = 0.0 if self._next_is_ready else took_s
            late = time.monotonic() + next_s > self._due_s(due_s)
            if not full and not late and self._open.num_steps == 1 and self._hungry:
                self._changed.notify_all()  # a pending poll stores the group if the next step is slow
        if full or late:
            self._store_open()

    def _due_s(self, hungry_s: float) -> float:
        """Return the time at which to store the open group, for a reader that has no work from `hungry_s` on."""
        linger_s = _READY_LINGER_S if self._next_is_ready else _LINGER_S
        linger_s = linger_s if self._queues.num_offered else 0.0
        return max(hungry_s, self._open_since + linger_s)

    def _store_open(self) -> None:
        """Store and offer the open group, unless it is empty."""
        with self._storing:
            with self._changed:
                if not self._open.num_steps or self._queues.finished:
                    return
                group = self._moving = self._open
                self._open = OpenGroup(self._credit.group_bytes)
            try:
                stored = group.store(self._put, zero_copy=self._zero_copy, begin_assembly=self._begin_assembly)
            except Exception as error:
                what = f"{group.num_steps} steps ({group.num_bytes} bytes) of {self._label}"
                self._fail(
                    error,
                    f"Storing {what}: the object store must have room. Use smaller batches, a smaller "
                    "prefetch_batches, or start Ray with more object_store_memory.",
                )
            else:
                self._offer(group.states, group=stored, num_bytes=group.num_bytes)
            finally:
                with self._changed:
                    self._moving = OpenGroup(0)

    def poll(self, poll: Poll) -> tuple[QueueEntry, ...]:
        """Return the next entries for a reader. Blocks up to `wait_s` for the first one."""
        now_s = time.monotonic()
        end_s = now_s + poll.wait_s
        hungry_s = now_s + min(poll.has_work_s, _HELD_S)
        with self._changed:
            self._pace_s = poll.pace_s if poll.pace_s is not None else self._pace_s
            self._acknowledge(poll.rank, poll.done)
            self._hungry.append(hungry_s)
        try:
            while self._await_entry(poll.start, hungry_s, end_s):
                self._store_open()
        finally:
            with self._changed:
                self._hungry.remove(hungry_s)
                self.starved_s += max(0.0, time.monotonic() - hungry_s)
        with self._changed:
            return self._queues.take(poll.rank, poll.start)

    def _await_entry(self, start: int, hungry_s: float, end_s: float) -> bool:
        """Wait for place `start`; return True if the caller should store the open group."""
        with self._changed:
            while not self._queues.ready(start):
                now_s = time.monotonic()
                due_s = self._due_s(hungry_s) if self._open.num_steps else end_s
                if now_s >= end_s or (self._open.num_steps and now_s >= due_s):
                    return self._open.num_steps > 0
                self._changed.wait(min(end_s, due_s) - now_s)
            return False

    def stats(self) -> PipelineStats:
        """Return the statistics of the pipeline's stages so far."""
        return self._source.stats()
