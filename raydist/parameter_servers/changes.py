"""Changes of one server's state: gradients and values written by hand, each applied once. Single-threaded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.requests import (
    Assign,
    Push,
    PushKey,
    Sender,
    ServerAnswer,
    ServerStats,
    Verdict,
    WriteStates,
)
from raydist.parameter_servers.server_optimizer import PushedRows, ServerGradients, ServerOptimizer, read_gradients
from raydist.parameter_servers.server_slices import PsSlices


@final
class AppliedUpdates:
    """The memory of one server by which it applies every change once.

    A closure that runs again pushes under the keys of its first run, and a message may come twice: the record has their
    keys. Keys of ended closures are forgotten, and count as known.

    >>> applied_updates = AppliedUpdates()
    >>> applied_updates.enter(Sender(0, 0), PushKey(closure=3, index=0))
    'applied'
    >>> applied_updates.enter(Sender(1, 0), PushKey(closure=3, index=0))
    'known'
    """

    def __init__(self) -> None:
        self._known: dict[int, set[int]] = {}
        self._finished_below = 0
        self._fenced: dict[int, int] = {}

    def fence(self, sender: Sender) -> None:
        """Refuse this generation of a worker, and earlier ones, from now on."""
        self._fenced[sender.worker] = max(sender.generation, self._fenced.get(sender.worker, -1))

    def is_fenced(self, sender: Sender) -> bool:
        """Return True if the sender's generation is fenced, so its changes are refused."""
        return sender.generation <= self._fenced.get(sender.worker, -1)

    def check(self, sender: Sender, key: PushKey) -> Literal["applied", "known", "fenced"]:
        """Return the verdict on a change: "applied" if it is new."""
        if self.is_fenced(sender):
            return "fenced"
        if key.closure < self._finished_below or key.index in self._known.get(key.closure, ()):
            return "known"
        return "applied"

    def enter(self, sender: Sender, key: PushKey) -> Literal["applied", "known", "fenced"]:
        """Return the verdict on a change, and record its key."""
        verdict = self.check(sender, key)
        if verdict == "applied":
            self._known.setdefault(key.closure, set()).add(key.index)
        if verdict != "fenced" and key.finished_below > self._finished_below:
            self._finished_below = key.finished_below
            for closure in [closure for closure in self._known if closure < key.finished_below]:
                del self._known[closure]
        return verdict


Answered = tuple[ServerAnswer, list[torch.Tensor]]
"""An answer and its tensors."""


@final
class DelayedAnswer:
    """A placeholder for a future answer. The transport keeps it until `due()` returns it."""

    __slots__ = ()


Reply = Answered | DelayedAnswer
"""The result of handling a request."""


@final
class DelayedAnswers:
    """Waiting requests, in the order in which they came.

    >>> delayed, gates = DelayedAnswers(), []
    >>> later = delayed.add(lambda: bool(gates), lambda: (ServerAnswer(), []))
    >>> delayed.due()
    []
    >>> gates.append("open")
    >>> [(which is later, answered) for which, answered in delayed.due()]
    [(True, (ServerAnswer(version=0, verdict='done', step=0, completes=0, value=None), []))]
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[DelayedAnswer, Callable[[], bool], Callable[[], Answered]]] = []

    def add(self, ready: Callable[[], bool], answer: Callable[[], Answered]) -> DelayedAnswer:
        """Add a request that is answered once `ready()` is true."""
        later = DelayedAnswer()
        self._waiting.append((later, ready, answer))
        return later

    def due(self) -> list[tuple[DelayedAnswer, Answered | Exception]]:
        """Return the answers that are ready, each once; an exception is to be raised at its request's sender."""
        ready = [entry for entry in self._waiting if entry[1]()]
        if ready:
            done = {id(entry) for entry in ready}
            self._waiting = [entry for entry in self._waiting if id(entry) not in done]
        return [(later, _answered(answer)) for later, _, answer in ready]

    def __len__(self) -> int:
        return len(self._waiting)


def _answered(answer: Callable[[], Answered]) -> Answered | Exception:
    try:
        return answer()
    except Exception as error:
        return error


@final
class CollectedSteps:
    """Incomplete steps, and the sums of the gradients that have come for them.

    A step is complete when each of its workers has pushed, or is known to be dead.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _CollectedStep] = {}
        self.step = 0  # the step of the present values: all earlier steps were applied

    def expect(self, step: int, completes: int) -> None:
        """Set the number of gradients of a step."""
        if completes and step >= self.step:
            self._of(step).completes = completes

    def add(self, step: int, worker: int, optimizer: int, gradients: ServerGradients | None) -> None:
        """Add a worker's gradients to a step that is not applied yet; None: they were known, and count as present."""
        mine = self._of(step)
        mine.came.add(worker)
        if gradients is not None:
            mine.sums.setdefault(optimizer, _GradientSum()).add(gradients)

    def drop(self, step: int, worker: int) -> None:
        """Do not wait for a worker in this step."""
        if step >= self.step:
            self._of(step).came.add(worker)

    def take(self) -> Mapping[int, ServerGradients] | None:
        """Return the means of the present step by optimizer, and go on to the next step; None if it is incomplete."""
        present = self._steps.get(self.step)
        if present is None or not present.completes or len(present.came) < present.completes:
            return None
        del self._steps[self.step]
        self.step += 1
        return {optimizer: summed.mean() for optimizer, summed in present.sums.items()}

    def _of(self, step: int) -> _CollectedStep:
        return self._steps.setdefault(step, _CollectedStep())


@final
class _CollectedStep:
    def __init__(self) -> None:
        self.completes = 0
        self.came: set[int] = set()
        self.sums: dict[int, _GradientSum] = {}


@final
class _GradientSum:
    """The sum of one optimizer's gradients, in memory of its own."""

    def __init__(self) -> None:
        self._count = 0
        self._dense: dict[int, torch.Tensor] = {}
        self._rows: dict[int, list[PushedRows]] = {}
        self._tables: dict[int, list[PushedRows]] = {}

    def add(self, gradients: ServerGradients) -> None:
        self._count += 1
        for number, gradient in gradients.slices.items():
            if isinstance(gradient, PushedRows):
                self._rows.setdefault(number, []).append(_kept(gradient))
            elif number in self._dense:
                self._dense[number].add_(gradient)
            else:
                self._dense[number] = gradient.clone()
        for handle, rows in gradients.tables.items():
            self._tables.setdefault(handle, []).append(_kept(rows))

    def mean(self) -> ServerGradients:
        """Return the mean over all pushes; a push without a gradient for a slice counts as zeros there."""
        slices: dict[int, torch.Tensor | PushedRows] = {}
        for number, total in self._dense.items():
            for rows in self._rows.pop(number, ()):
                total.index_add_(0, rows.rows, rows.values)
            slices[number] = total.div_(self._count)
        slices |= {number: self._joined(rows) for number, rows in self._rows.items()}
        return ServerGradients(slices, {handle: self._joined(rows) for handle, rows in self._tables.items()})

    def _joined(self, parts: list[PushedRows]) -> PushedRows:
        values = torch.cat([part.values for part in parts]).div_(self._count)
        return PushedRows(torch.cat([part.rows for part in parts]), values)


def _kept(rows: PushedRows) -> PushedRows:
    return PushedRows(rows.rows.clone(), rows.values.clone())


@final
class Changes:
    """Applies the changes that workers push."""

    def __init__(
        self,
        values: PsSlices,
        optimizers: Mapping[int, ServerOptimizer],
        applied_updates: AppliedUpdates,
        delayed: DelayedAnswers,
        stats: ServerStats,
    ) -> None:
        self._values = values
        self._optimizers = optimizers
        self._applied_updates = applied_updates
        self._delayed = delayed
        self._stats = stats
        self._collected = CollectedSteps()

    @property
    def step(self) -> int:
        """SyncWithBackups: the step of the present values."""
        return self._collected.step

    def push(self, push: Push, tensors: Sequence[torch.Tensor]) -> Reply:
        """Apply gradients, or collect them for their step."""
        verdict = self._applied_updates.check(push.sender, push.key)
        if verdict == "fenced":
            self._stats.fenced += 1
            return ServerAnswer(self._values.version, "fenced", self.step), []
        if push.step >= 0:
            return self._collect(push, tensors, known=verdict == "known")
        if verdict == "known":
            self._repeated(push)
        else:
            behind = self._values.version - push.read_version
            self._apply({push.optimizer: self._read(push, tensors)})
            self._applied_updates.enter(push.sender, push.key)
            self._note(tensors, behind)
        return self._answered(push, verdict)

    def write(self, change: Assign | WriteStates, tensors: Sequence[torch.Tensor]) -> Answered:
        """Write values of slices, or optimizer states."""
        verdict = self._applied_updates.check(change.sender, change.key)
        if verdict == "fenced":
            self._stats.fenced += 1
        elif verdict == "known":
            self._repeated(change)
        else:
            if isinstance(change, Assign):
                self._write_values(change, tensors)
            else:
                self._write_states(change)
            self._applied_updates.enter(change.sender, change.key)
        return ServerAnswer(self._values.version, verdict, self.step), []

    def expect(self, step: int, completes: int) -> None:
        """SyncWithBackups: set the number of gradients of a step, and apply the step if it is complete."""
        self._collected.expect(step, completes)
        self._apply_complete()

    def drop(self, step: int, worker: int, completes: int) -> None:
        """SyncWithBackups: do not wait for a worker in a step of so many gradients."""
        self._collected.drop(step, worker)
        self.expect(step, completes)

    def once_applied(self, step: int, answer: Callable[[], Answered]) -> Reply:
        """Answer once a step has been applied here."""
        return answer() if self.step > step else self._delayed.add(lambda: self.step > step, answer)

    def _collect(self, push: Push, tensors: Sequence[torch.Tensor], *, known: bool) -> Reply:
        if push.step < self.step:
            self._stats.late += not known
            return self._answered(push, "known" if known else "late")
        gradients = None if known else self._read(push, tensors)
        self._collected.add(push.step, push.sender.worker, push.optimizer, gradients)
        if known:
            self._repeated(push)
        else:
            self._applied_updates.enter(push.sender, push.key)
            self._note(tensors, self._values.version - push.read_version)
        self.expect(push.step, push.completes)
        if not push.pull:
            return self._answered(push, "known" if known else "applied")
        return self.once_applied(push.step, lambda: self._answered(push, "known" if known else "applied"))

    def _apply_complete(self) -> None:
        while (means := self._collected.take()) is not None:
            self._stats.steps += 1
            self._apply(means)

    def _read(self, push: Push, tensors: Sequence[torch.Tensor]) -> ServerGradients:
        gradients = read_gradients(push, tensors, self._values)
        optimizer = self._optimizer(push.optimizer)
        optimizer.require_known(gradients)
        if push.options is not None:
            optimizer.change_options(push.options)
        return gradients

    def _optimizer(self, handle: int) -> ServerOptimizer:
        optimizer = self._optimizers.get(handle)
        if optimizer is None:
            raise InvalidArgumentError(
                f"Gradients and states must be of an optimizer that the server has, got handle {handle} of "
                f"{sorted(self._optimizers)}. Add it first."
            )
        return optimizer

    def _apply(self, gradients: Mapping[int, ServerGradients]) -> None:
        with self._timed():
            with self._values.changing():
                for handle, each in gradients.items():
                    self._optimizers[handle].step(each)
            for handle, each in gradients.items():
                self._optimizers[handle].step_tables(each)

    def _write_values(self, assign: Assign, tensors: Sequence[torch.Tensor]) -> None:
        values = [self._values.value(number) for number in assign.slices]
        if not len(values) == len(tensors) == len(assign.adds):
            raise InvalidArgumentError(
                f"Values must be given for each of {len(values)} slices, got {len(tensors)} of them and "
                f"{len(assign.adds)} marks. Give one tensor for each slice."
            )
        with self._timed(), self._values.changing():
            for value, tensor, adds in zip(values, tensors, assign.adds, strict=True):
                if adds:
                    value.add_(tensor)
                else:
                    value.copy_(tensor)
        self._note(tensors, None)

    def _write_states(self, written: WriteStates) -> None:
        for handle, states in written.states.items():
            self._optimizer(handle).require_slices(states)
        for handle, states in written.states.items():
            self._optimizer(handle).replace_state(states)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._stats.apply_seconds += time.perf_counter() - begin

    def _note(self, tensors: Sequence[torch.Tensor], behind: int | None) -> None:
        self._stats.pushes += 1
        self._stats.bytes_pushed += sum(tensor.nbytes for tensor in tensors)
        if behind is not None:
            self._stats.staleness[behind] = self._stats.staleness.get(behind, 0) + 1

    def _repeated(self, change: Push | Assign | WriteStates) -> None:
        self._stats.repeated += 1
        self._applied_updates.enter(change.sender, change.key)  # for the key's `finished_below`

    def _answered(self, push: Push, verdict: Verdict) -> Answered:
        tensors = [self._values.value(number) for number in push.pull]
        if tensors:
            self._stats.pulls += 1
            self._stats.bytes_pulled += sum(tensor.nbytes for tensor in tensors)
        return ServerAnswer(self._values.version, verdict, self.step), tensors
