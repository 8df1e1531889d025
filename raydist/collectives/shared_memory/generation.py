"""One generation of a group in shared memory: waits, failures and its end."""

from __future__ import annotations

import threading
import time
from typing import final

import torch

from raydist.collectives.base import Membership, Work
from raydist.collectives.shared_memory.board import Board
from raydist.collectives.shared_memory.layout import Layout
from raydist.collectives.shared_memory.mailboxes import Mailboxes
from raydist.collectives.shared_memory.outside import Outside
from raydist.collectives.shared_memory.segment import Segment
from raydist.collectives.shared_memory.sequence import CollectiveSequence
from raydist.collectives.shared_memory.spare_time import use_spare_time
from raydist.collectives.shared_memory.staging import Staging
from raydist.collectives.shared_memory.task import Condition, Task
from raydist.collectives.translation import describe_operation, describe_ranks
from raydist.crowds import is_crowd
from raydist.errors import CancelledError, DeadlineExceededError, RaydistError, UnavailableError

__all__ = ["SharedGeneration", "TaskWork"]

# How long the death of a peer may go unnoticed by a rank that waits. A look takes 70 calls: where 64 ranks share two
# cores and one comes late, they would hold it up for longer with theirs.
_SLICE_S = 0.05
_SLICE_IN_A_CROWD_S = 0.25
_MOST_VIEWS = 4096
_KINDS: dict[str, type[RaydistError]] = {
    kind.__name__: kind for kind in (CancelledError, DeadlineExceededError, UnavailableError)
}


@final
class SharedGeneration:
    """What a rank does in one segment. After its first failure every call fails the same way.

    Args:
        membership: This rank's place.
        segment: The group's, which belongs to this object from now on.
        timeout_s: The limit of a wait that has none of its own.
        outside: The rest of the group, where the segment's ranks are not all of it.
        layout: Of the segment; the usual one for so many ranks, unless given.
    """

    def __init__(
        self,
        membership: Membership,
        segment: Segment,
        timeout_s: float,
        outside: Outside | None = None,
        layout: Layout | None = None,
    ) -> None:
        self._outside = outside or Outside(membership, range(membership.world_size))
        self.membership = self._outside.membership
        self.segment = segment
        self.board = Board(segment, layout or Layout.of(membership.world_size), membership.rank)
        self.sequence = CollectiveSequence(segment, self.board)
        self.mailboxes = Mailboxes(segment, self.board)
        self.staging = Staging(segment, self.board)
        self._timeout_s = timeout_s
        self._slice_s = _SLICE_IN_A_CROWD_S if is_crowd(membership.world_size) else _SLICE_S
        self._lock = threading.Lock()
        self._failure: RaydistError | None = None
        self._absent: tuple[int, ...] | None = None
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._stacks: dict[tuple[int, int, int, int, torch.dtype], torch.Tensor] = {}

    def wait(self, task: Task, timeout_s: float | None) -> None:
        """Wait for an operation. Only the group's own limit fails the group; after a shorter one, wait again."""
        began = time.monotonic()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        seen, task.left_at = task.left_at, None
        if seen is not None and not task.done:
            # Nothing is looked after meanwhile: of a crowd whose ranks come one by one, each look delays the next one.
            use_spare_time()
            self.board.sleep(seen, min(self._slice_s, limit_s))
            self.advance()
        if not task.done:
            self._outside.attend()
            try:
                self._sleep_until_done(task, began, limit_s, fatal=timeout_s is None)
            finally:
                self._outside.leave()
        if task.error is not None:
            raise task.error

    def bell_where_idle(self) -> int | None:
        """How often this rank's bell has rung, where nothing of it is under way: see `Task.left_at`."""
        if self.sequence.num_begun or self.mailboxes.num_under_way or self._outside.num_under_way:
            return None
        return self.board.bell.count()

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor in the segment; the same object for the same place, as making one takes 2 us."""
        key = (offset, numel, dtype)
        known = self._views.get(key)
        if known is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            known = self._views[key] = self.segment.view(offset, numel, dtype)
        return known

    def stacked(self, offset: int, stride: int, rows: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """What lies `stride` bytes apart, as the rows of one tensor; the same object for the same place."""
        key = (offset, stride, rows, numel, dtype)
        known = self._stacks.get(key)
        if known is None:
            if len(self._stacks) >= _MOST_VIEWS:
                self._stacks.clear()
            known = self.segment.stacked(offset, stride, rows, numel, dtype)
            self._stacks[key] = known
        return known

    def advance(self) -> None:
        """Do all that can be done now, of everything under way."""
        try:
            self.sequence.advance()
            if self.mailboxes.num_under_way:
                self.mailboxes.advance()
            if self._outside.num_under_way:
                self._outside.advance()
        except BaseException as error:
            # What this rank has left out, its peers would wait for.
            what = f"{type(error).__name__}: {error}"
            self._record(UnavailableError(f"rank {self.membership.rank} failed inside a collective ({what})."))
            raise

    def check(self, operation: str) -> None:
        """Raise if the group has failed."""
        if self._failure is None and not self.board.any_failed():
            return
        failure = self._failure or self._heard()
        if failure is not None:
            raise type(failure)(
                f"{describe_operation(self.membership, operation)} was given up: {failure.message}"
                f"{self._who_is_absent(failure)} Reconfigure the group to go on."
            )

    def abort(self) -> None:
        """Fail the group for every member."""
        rank, group = self.membership.rank, self.membership.group
        self._record(CancelledError(f"rank {rank} aborted group {group!r}, generation {self.membership.generation}."))

    def leave(self) -> None:
        """Let go of the segment: for the others, this rank is gone."""
        self.sequence.drop()
        self.mailboxes.drop()
        self._outside.drop()
        self._views.clear()
        self._stacks.clear()
        self.segment.close()

    def _sleep_until_done(self, task: Task, began: float, limit_s: float, *, fatal: bool) -> None:
        deadline, next_look = began + limit_s, began + self._slice_s
        bell = self.board.bell
        while True:
            seen = bell.count()
            self.advance()
            if task.done:
                return
            if self._failure is not None or self.board.any_failed():
                self.check(task.operation)
            now = time.monotonic()
            if now >= deadline:
                raise self._late(task, limit_s, fatal=fatal)
            if now >= next_look:
                self._listen()
                self._look_for_the_dead(task)
                next_look = now + self._slice_s
            use_spare_time()
            seconds = min(self._slice_s, deadline - now)
            if self._outside.is_empty:
                self.board.sleep(seen, seconds)
            else:
                self._sleep(task, seen, seconds)

    def _sleep(self, task: Task, seen: int, seconds: float) -> None:
        outside = self._outside
        if outside.is_idle and self.sequence.waits_inside(task):
            self.board.sleep(seen, seconds)
            return
        # A rank that passes messages on within its host listens to its bell.
        if not self.mailboxes.num_under_way and outside.sleep(self._conditions(task), seconds):
            return
        outside.leave()
        self.board.sleep(seen, seconds)
        outside.attend()

    def _listen(self) -> None:
        heard = self._outside.failure()
        if heard is not None:
            self._record(heard, known=True)

    def _look_for_the_dead(self, task: Task) -> None:
        dead = self._dead(task)
        self.advance()  # they may have done their part before they left
        dead = tuple(rank for rank in dead if rank in self._dead(task))
        if not task.done and dead:
            message = (
                f"{describe_operation(self.membership, task.operation)} failed: {describe_ranks(dead)} "
                f"{'are' if len(dead) > 1 else 'is'} gone."
            )
            error = UnavailableError(message)
            self._record(error)
            raise error

    def _conditions(self, task: Task) -> list[Condition]:
        return [
            *self.sequence.conditions(task),
            *self.mailboxes.conditions(task),
            *self._outside.conditions(task),
        ]

    def _dead(self, task: Task) -> tuple[int, ...]:
        conditions = self._conditions(task)
        lost = {rank for condition in conditions for rank in condition.lost()}
        here = {place for condition in conditions for place in condition.missing()} - {self.board.rank}
        lost.update(self._outside.ranks[place] for place in here if not self.segment.holds(place))
        return tuple(sorted(lost))

    def _missing(self, task: Task) -> tuple[int, ...]:
        conditions = self._conditions(task)
        missing = {rank for condition in conditions for rank in condition.outside()}
        missing.update(self._outside.ranks[place] for condition in conditions for place in condition.missing())
        return tuple(sorted(missing - {self.membership.rank}))

    def _late(self, task: Task, limit_s: float, *, fatal: bool) -> RaydistError:
        message = f"{describe_operation(self.membership, task.operation)} timed out after {limit_s} s."
        if not fatal:
            return DeadlineExceededError(f"{message} It goes on; wait again, or allow more time.")
        missing = () if self._outside.calls_the_roll else self._missing(task)
        advice = "Raise the limit (Timeouts.collective_s) if the others were only slow."
        error = DeadlineExceededError(f"{message}{_no_sign(missing)} {advice}")
        self._record(error)  # the others answer the roll when they know of it
        return DeadlineExceededError(f"{error.message}{self._who_is_absent(error)}")

    def _who_is_absent(self, failure: RaydistError) -> str:
        """Who did not answer when the roll was called, where that tells more than the failure; called once."""
        if not isinstance(failure, DeadlineExceededError) or not self._outside.calls_the_roll:
            return ""
        if self._absent is None:
            self._absent = self._outside.absent()
        return _no_sign(self._absent)

    def _record(self, failure: RaydistError, *, known: bool = False) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            self.board.post(f"{type(failure).__name__}\n{failure.message}".encode())
        if not known:
            self._outside.post(failure)

    def _heard(self) -> RaydistError | None:
        posted = self.board.posted()
        if posted is None:
            return None
        kind, _, message = posted.decode(errors="replace").partition("\n")
        return _KINDS[kind](message)


def _no_sign(ranks: tuple[int, ...]) -> str:
    return f" No sign of {describe_ranks(ranks)}." if ranks else ""


@final
class TaskWork(Work):
    """An operation under way."""

    def __init__(self, generation: SharedGeneration, task: Task) -> None:
        self._generation = generation
        self._task = task

    def wait(self, timeout_s: float | None = None) -> None:
        self._generation.wait(self._task, timeout_s)
        self.noted = self._task.noted
