"""Steps in flight on replicas in lock step: sending steps in groups, waiting for results, reporting errors.

Steps are sent at once while the replicas are idle, and in groups while they are busy: a message costs about as much as
a short step.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

from raydist.actors.readers.driver_epoch import BatchLeaf, DrawnBatch
from raydist.actors.replica import ReplicaActors
from raydist.cluster.preemption import end_if_preempted
from raydist.core.errors import FailedPreconditionError, Preempted, UnavailableError
from raydist.core.exception_utils import what_was_raised
from raydist.core.fork_guard import OwningProcess
from raydist.core.values import Part
from raydist.replicas.batching_policy import BatchingPolicy
from raydist.replicas.results import StepOutcome, StepResult
from raydist.replicas.runner import ReplicaRunner
from raydist.replicas.sent_group import Dispatched, Failure, SentGroup, SentPlace, by_ranks
from raydist.replicas.step_message import GroupResult, PlannedStep, SentObjects, address_steps

_BUSY = 2  # groups in flight: one that the replicas run, and one in their queue
_SLICE_S = 5.0  # longest time that the thread lives on after `close`

_MOST_KEPT = 256  # steps


@final
class DispatchedStep(StepOutcome):
    """A step that was dispatched. Results refer to this object, so it holds no arguments of the step."""

    __slots__ = ("_num_replicas", "_steps", "number", "sent")

    def __init__(self, steps: DispatchedSteps, number: int) -> None:
        self._steps = steps
        self._num_replicas = steps.num_replicas // steps.same_rows
        self.number = number
        self.sent = SentPlace()

    @property
    def num_replicas(self) -> int:
        return self._num_replicas

    def results(self) -> list[StepResult]:
        return self._steps.results_of(self)[:: self._steps.same_rows]

    def part(self, rank: int, leaf_index: int, nest: str) -> Part:
        ref = self._steps.group_of(self).refs[rank * self._steps.same_rows]
        if ref is None:
            raise UnavailableError(
                f"The result of step {self.number} was lost with replica {rank}, which was replaced."
            )
        return Part(ref=ref, leaf_index=leaf_index, place=self.sent.place, nest=nest)


@final
class DispatchedSteps:
    """A window of steps, sent in order. Thread-safe: one thread waits for steps, the others wait for that thread."""

    def __init__(self, actors: ReplicaActors, step_s: float, process: OwningProcess) -> None:
        self.num_replicas = len(actors.names)
        self.same_rows = 1  # number of consecutive replicas that get the same rows; the results of the first one count
        # callbacks for each ended step, in order, with all results. They must neither raise nor block.
        self.on_results: list[Callable[[Sequence[StepResult]], None]] = []
        self.generation = -1  # current generation (incarnation) of the process group; -1 before the first
        self.failed = False  # True if something failed since the current generation was formed
        self.dead: UnavailableError | None = None  # the error of a replica that is gone for good
        # replaces lost replicas; returns True if that succeeded, and the steps were sent again. None: nobody does
        self.recover: Callable[[Exception], bool] | None = None
        self._actors = actors
        self._step_s = step_s
        self._process = process
        self._turn = threading.RLock()  # of the thread that waits for steps
        self._sent = tuple(SentObjects() for _ in actors.names)
        self._policy = BatchingPolicy()
        self._untold: Exception | None = None
        self._failure: Failure | None = None  # the first of this generation
        self.last = -1  # number of the last dispatched step
        self.keep_from: int | None = None  # steps from this one on are kept, because they may run again
        self._changed = threading.Condition()  # of everything below
        self._gathered: list[Dispatched] = []
        self._kept: list[Dispatched] = []  # done steps that may have to run again
        self._running: deque[SentGroup] = deque()  # not known to be done
        self._unfinished: deque[SentGroup] = deque()  # whose errors nobody has read
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def num_under_way(self) -> int:
        """Number of steps that nobody has waited for."""
        with self._changed:
            return len(self._gathered) + sum(len(group.keys) for group in self._unfinished)

    @property
    def first_unfinished(self) -> int:
        """Number of the first step that nobody has waited for; of the next step if there is none."""
        with self._changed:
            groups = [group.first_step for group in self._unfinished if group.keys]
            return min([*groups, *(each.number for each in self._gathered)], default=self.last + 1)

    def require_alive(self) -> None:
        """Raise if a replica is gone for good."""
        if self.dead is not None:
            raise self.dead

    def wait_for(
        self,
        refs: Sequence[Any],
        timeout_s: float,
        doing: str,
        limit: str = "Timeouts.step_s",
        *,
        names: Sequence[str] | None = None,
        present: bool = True,
    ) -> list[Any]:
        """Wait for the results of calls to replicas; see `supervision.wait_for_all`.

        Args:
            doing: The activity, for messages.
            limit: Name of the setting that gives the limit, for messages.
            names: Names of the called replicas; None for all replicas.
            present: An error concerns the current generation of the group: `failed` and `dead` are updated.
        """
        on_error = self.abort if present else lambda: None
        try:
            return self._actors.wait(
                refs, names or self._actors.names, timeout_s=timeout_s, doing=doing, limit=limit, on_error=on_error
            )
        except Exception as error:
            if present:
                self.failed = True
                if isinstance(error, UnavailableError) and error.actor is not None:
                    self.dead = error
            raise

    def abort(self) -> None:
        """Abort the collectives of every replica, because one of the replicas will not take part."""
        self.failed = True
        self._actors.control_all(ReplicaRunner.abort.__name__, self.generation)

    def dispatch(self, step: PlannedStep) -> DispatchedStep:
        """Send one step to every replica, now or with others as soon as a group is done.

        Blocks only while the window is full; the error of the oldest steps may be raised then.
        """
        self.require_alive()
        with self._turn:
            while self.num_under_way >= self._policy.window(self._keys(step)):
                self._finish_oldest()
                self.tell()
            at_once = step.carries_values  # sends the steps whose results are parts; may block, so not in the thread
            dispatched = DispatchedStep(self, step.header.step)
            self.last = dispatched.number
            with self._changed:
                if len(self._gathered) >= self._policy.group_size(self._keys(step)):
                    self.send_all()
                self._gathered.append(Dispatched(step, dispatched.sent))
                full = len(self._gathered) >= self._policy.group_size(self._keys())
                if at_once or full or len(self._running) < _BUSY:
                    self.send_all()
                else:
                    self._wake_thread()
        return dispatched

    def _keys(self, *more: PlannedStep) -> list[bytes]:
        with self._changed:
            return [step.header.payload.digest for step in (*(each.planned for each in self._gathered), *more)]

    def send_all(self) -> None:
        """Send all dispatched steps, so that a call to a replica comes after them."""
        with self._changed:
            gathered, self._gathered = self._gathered, []
            if gathered:
                self._send(gathered)

    def _send(self, steps: Sequence[Dispatched], ranks: Sequence[int] | None = None) -> None:
        """Send steps in one message to each of these replicas (None: all)."""
        for each in steps:
            if each.planned.header.generation != self.generation:  # a recovery came between its making and its sending
                each.planned = replace(each.planned, header=replace(each.planned.header, generation=self.generation))
        group = SentGroup(steps, self._refs(steps, ranks))
        for place, each in enumerate(steps):
            if each.sent is not None:
                each.sent.group, each.sent.place = group, place
        self._running.append(group)
        self._unfinished.append(group)

    def _refs(self, steps: Sequence[Dispatched], ranks: Sequence[int] | None) -> list[Any]:
        try:
            messages = address_steps([each.planned for each in steps], self._sent, ranks, self.same_rows)
            return [
                self._actors.send(rank, *messages[rank]) if rank in messages else None
                for rank in range(self.num_replicas)
            ]
        except BaseException:  # KeyboardInterrupt, too: replicas with the steps would wait for replicas without them
            self.abort()
            raise

    def _wake_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_when_done, name="raydist-dispatch", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _send_when_done(self) -> None:
        """Send steps when a group is done. Runs in a thread: the program may be busy while its steps wait."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._gathered and self._running))
                if self._closed:
                    return
                group = self._running[0]
            if self._actors.are_ready([ref for ref in group.refs if ref is not None][:1], _SLICE_S):
                self._note_done(group)

    def _note_done(self, group: SentGroup) -> None:
        with self._changed:
            if group in self._running:
                self._running.remove(group)
            if len(self._running) < _BUSY:
                self.send_all()

    def wait(self) -> None:
        """Wait for every dispatched step; raise the error of the first step that failed."""
        with self._turn:
            self.tell()
            while self._finish_oldest():
                self.tell()

    def until_now(self) -> Callable[[], None]:
        """Return a function that waits, in any thread, for the steps dispatched so far. Later calls raise errors."""
        last = self.last

        def wait() -> None:
            with self._turn:
                while (group := self._oldest()) is not None and group.first_step <= last:
                    self._finish_oldest()

        return wait

    def give_up(self) -> None:
        """Send the collected steps, and forget all in flight: they follow a failed step, and the replicas refuse them.

        Replicas must have what the collected steps bring: the driver will not send it again.
        """
        with self._changed:
            self.send_all()
            groups = list(self._unfinished)
            self._unfinished.clear()
            self._running.clear()
            self._kept.clear()
            self.keep_from = None
        for group in groups:
            group.cause = self._failure
            self._actors.discard([ref for ref in group.refs if ref is not None])
        self._failure = None
        for sent in self._sent:
            sent.forget()

    def resize(self, num_replicas: int) -> None:
        """Send later steps to another number of replicas. All steps must have ended."""
        self.num_replicas = num_replicas
        self._sent = tuple(SentObjects() for _ in range(num_replicas))

    def tell(self) -> None:
        """Raise the error of a step that has not been raised yet."""
        self._process.require("used")
        error, self._untold = self._untold, None
        if error is not None:
            raise _to_raise(error).with_traceback(None)

    def _oldest(self) -> SentGroup | None:
        """Return the first group whose errors nobody has read; None if there is none."""
        with self._changed:
            if not self._unfinished:
                self.send_all()
            return self._unfinished[0] if self._unfinished else None

    def _is_under_way(self, group: SentGroup) -> bool:
        """Return True if nobody has waited for the group."""
        with self._changed:
            return group in self._unfinished

    def _finish_oldest(self) -> bool:
        """Wait for the oldest group; return False if there is none. `tell` raises its error later."""
        group = self._oldest()
        if group is None:
            return False
        consequence = self.failed  # of an error that was reported already
        group.cause = self._failure
        error = None
        try:
            error = self._finish(group)
        finally:
            with self._changed:
                if group in self._unfinished:  # else a recovery has settled it
                    self._unfinished.remove(group)
                self._note_done(group)
        self._failure = group.cause
        if not consequence:
            self._untold = self._untold or error
        return True

    def _finish(self, group: SentGroup, *, present: bool = True) -> Exception | None:
        """Wait until the steps of a group have ended; return the error of the first one that failed.

        `present` is False for steps of an earlier generation.
        """
        limit_s = self._step_s * len(group.keys)
        error: Exception | None = None
        try:
            answers = self._await(group, limit_s, present=present)
        except Exception as failure:
            if present and self.recover is not None and self.recover(failure):
                return None
            answers = self.answers_before_failure(group)
            error = group.fail(failure, answers)
            if present:
                self._keep_failed(group)
        else:
            error = group.succeed(answers)
            self._learn(group, answers)
        self._tell(group)
        for remark in [remark for answer in answers if answer for remark in answer.remarks]:
            warnings.warn(remark, stacklevel=2)
        return error

    def _await(self, group: SentGroup, limit_s: float, *, present: bool) -> list[GroupResult | None]:
        asked = [rank for rank, ref in enumerate(group.refs) if ref is not None]
        found = self.wait_for(
            [group.refs[rank] for rank in asked],
            limit_s,
            group.title,
            names=[self._actors.names[rank] for rank in asked],
            present=present,
        )
        answers: list[GroupResult | None] = [None] * self.num_replicas
        for rank, answer in zip(asked, found, strict=True):
            answers[rank] = answer
        return answers

    def answers_before_failure(self, group: SentGroup) -> list[GroupResult | None]:
        """Return each replica's results of the steps that it completed; None for a replica that is gone."""
        asked = [ref for ref in group.refs if ref is not None]
        found = iter(self._actors.done_before_failure(asked))
        return [None if ref is None else next(found) for ref in group.refs]

    def _tell(self, group: SentGroup) -> None:
        """Pass the results of ended steps on, and drop what only a recovery needed."""
        for place, results in enumerate(group.outcomes):
            if not isinstance(results, Exception):
                if group.steps[place].sent is not None:
                    for callback in self.on_results:
                        callback(results[:: self.same_rows])
                group.outcomes[place] = [each.without_summaries() for each in results]  # results may live long
        group.steps = ()

    def _learn(self, group: SentGroup, answers: Sequence[GroupResult | None]) -> None:
        given = [answer for answer in answers if answer is not None]
        seconds = max(answer.seconds for answer in given) / len(group.keys)
        for place, key in enumerate(group.keys):
            self._policy.learn(key, seconds=seconds, num_bytes=max(each.num_bytes for each in group.results_at(place)))
        boundary = min((answer.boundary for answer in given if answer.boundary is not None), default=self.last + 1)
        again = [replace(each, sent=None, earlier={}) for each in group.steps]
        first = boundary if self.keep_from is None else min(boundary, self.keep_from)
        kept = [each for each in (*self._kept, *again) if each.number >= first]
        if len(kept) > _MOST_KEPT:
            self.keep_from = None
            kept = [each for each in kept if each.number >= boundary]
        # If gradients of so many steps wait for an optimizer, no recovery goes back there.
        self._kept = kept if len(kept) <= _MOST_KEPT else []

    def _keep_failed(self, group: SentGroup) -> None:
        """Keep the steps of a group that failed, if copies are made."""
        if self.keep_from is not None:
            steps = zip(group.steps, group.outcomes, strict=True)
            again = (each.given_up() if isinstance(outcome, Exception) else each for each, outcome in steps)
            self._kept += [replace(each, sent=None, earlier={}) for each in again]

    def set_aside(self) -> int:
        """Give up all steps in flight, as `give_up` does, but keep the steps since the last copy. Blocks shortly.

        Returns:
            Number of the first step that does not count.
        """
        with self._changed:
            self.send_all()
            rest = [each.given_up() for group in self._unfinished for each in group.steps]
            kept, keep_from, failure = [*self._kept, *rest], self.keep_from, self._failure
        self.give_up()
        self._kept, self.keep_from = kept, keep_from
        return failure.step if failure else min((each.number for each in rest), default=self.last + 1)

    def unfinished_refs(self, rank: int) -> list[Any]:
        """Return the references of a replica's answers that nobody has waited for."""
        with self._changed:
            return [group.refs[rank] for group in self._unfinished if group.refs[rank] is not None]

    def _known(self) -> list[Dispatched]:
        """Return the steps that may run again, and those that were not sent yet."""
        with self._changed:
            return [*self._kept, *(each for group in self._unfinished for each in group.steps), *self._gathered]

    def can_go_back_to(self, step: int) -> bool:
        """Return True if all steps from this one on can be sent again."""
        return step > self.last or any(each.number == step for each in self._known())

    def batches(self) -> set[DrawnBatch]:
        """Return the batches of the steps that may run again, and of those that were not sent yet."""
        leaves = (leaf for each in self._known() for leaf in each.planned.parts)
        return {leaf.drawn for leaf in leaves if isinstance(leaf, BatchLeaf)}

    def send_again(self, resume: Sequence[int], *, from_copies: bool = False) -> int:
        """Settle all steps in flight in a new generation: send to each replica those from its `resume` on.

        Args:
            resume: The first step of each replica.
            from_copies: All replicas have gone back to copies: checkpoints that were saved since are not saved again.

        Returns:
            The number of results that were lost.
        """
        first = min(resume)
        with self._changed:
            groups, waiting, self._gathered = list(self._unfinished), self._gathered, []
            self._unfinished.clear()
            self._running.clear()
            again = [
                each.given_up() if from_copies and each.planned.header.looks_only else each.repeated()
                for each in self._kept
                if each.number >= first
            ]
            self._kept = [each for each in self._kept if each.number < first]
            lost = 0
            for group in groups:
                answers = self.answers_before_failure(group)
                again += group.end_before(first, answers)
                lost += group.num_lost(answers)
                self._tell(group)
            for sent in self._sent:
                sent.forget()
            for ranks, steps in by_ranks(again, resume):
                lost += sum(len(set(range(self.num_replicas)) - {*ranks, *each.earlier}) for each in steps)
                self._send(steps, ranks)
            self._gathered = waiting
        return lost

    def results_of(self, step: DispatchedStep) -> list[StepResult]:
        """Return the results of one step in rank order. Blocks; raises the step's error, at every call."""
        self._process.require("used")
        with self._turn:
            group = self.group_of(step)
            while not group.outcomes and self._is_under_way(group):
                self._finish_oldest()
                group = self.group_of(step)  # another one after a recovery
                if not group.outcomes:
                    self.tell()
            if not group.outcomes:
                self._finish(group, present=False)
            try:
                return group.results_at(step.sent.place)
            except BaseException as error:
                _to_raise(error)
                # The caller gets the error here, so closing the strategy must not raise the same error again.
                if self._untold is not None and error is what_was_raised(self._untold):
                    self._untold = None
                raise

    def group_of(self, step: DispatchedStep) -> SentGroup:
        """Return the group of a step, which is sent now if it was not."""
        if step.sent.group is None:
            self.send_all()
        if step.sent.group is None:
            raise FailedPreconditionError(f"raydist bug: step {step.number} must have been sent by now.")
        return step.sent.group

    def close(self) -> None:
        """End the thread. Collected steps are not sent. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _SLICE_S)


def _to_raise(error: BaseException) -> BaseException:
    """Return the original error. After a preemption of the replicas, the driver leaves the process group, too."""
    raised = what_was_raised(error)
    if isinstance(raised, Preempted):
        end_if_preempted(before_draw=False)
    return raised
