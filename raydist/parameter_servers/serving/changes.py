"""Changes of one server's state: gradients and values written by hand, each applied once. Single-threaded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

import torch

from raydist.errors import InvalidArgumentError
from raydist.parameter_servers.optimizer_requests import WriteStates
from raydist.parameter_servers.requests import Assign, Push, ServerAnswer, Verdict
from raydist.parameter_servers.server_stats import ServerMeter
from raydist.parameter_servers.serving.collected_steps import CollectedSteps
from raydist.parameter_servers.serving.gradients import ServerGradients, read_gradients
from raydist.parameter_servers.serving.ledger import Ledger
from raydist.parameter_servers.serving.served_optimizers import ServedOptimizer
from raydist.parameter_servers.serving.served_slices import ServedSlices
from raydist.parameter_servers.serving.waiting import Answered, Reply, Waits

__all__ = ["Changes"]


@final
class Changes:
    """Applies the changes that workers push.

    Args:
        values: The server's slices.
        optimizers: The server's optimizers, by handle.
        ledger: The keys of known changes.
        waits: Delayed answers.
        meter: The server's counts.
    """

    def __init__(
        self,
        values: ServedSlices,
        optimizers: Mapping[int, ServedOptimizer],
        ledger: Ledger,
        waits: Waits,
        meter: ServerMeter,
    ) -> None:
        self._values = values
        self._optimizers = optimizers
        self._ledger = ledger
        self._waits = waits
        self._meter = meter
        self._collected = CollectedSteps()

    @property
    def step(self) -> int:
        """SyncWithBackups: the step of the present values."""
        return self._collected.step

    def push(self, push: Push, tensors: Sequence[torch.Tensor]) -> Reply:
        """Apply gradients, or collect them for their step."""
        verdict = self._ledger.check(push.sender, push.key)
        if verdict == "fenced":
            self._meter.fenced += 1
            return ServerAnswer(self._values.version, "fenced", self.step), []
        if push.step >= 0:
            return self._collect(push, tensors, known=verdict == "known")
        if verdict == "known":
            self._repeated(push)
        else:
            behind = self._values.version - push.read_version
            self._apply({push.optimizer: self._read(push, tensors)})
            self._ledger.enter(push.sender, push.key)
            self._note(tensors, behind)
        return self._answered(push, verdict)

    def assign(self, assign: Assign, tensors: Sequence[torch.Tensor]) -> Answered:
        """Write values of slices."""
        return self._write_once(assign, lambda: self._write(assign, tensors))

    def write_states(self, written: WriteStates) -> Answered:
        """Write optimizer states."""
        return self._write_once(written, lambda: self._write_states(written))

    def _write_once(self, change: Assign | WriteStates, write: Callable[[], None]) -> Answered:
        verdict = self._ledger.check(change.sender, change.key)
        if verdict == "fenced":
            self._meter.fenced += 1
        elif verdict == "known":
            self._repeated(change)
        else:
            write()
            self._ledger.enter(change.sender, change.key)
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
        return answer() if self.step > step else self._waits.add(lambda: self.step > step, answer)

    def _collect(self, push: Push, tensors: Sequence[torch.Tensor], *, known: bool) -> Reply:
        if push.step < self.step:
            self._meter.late += not known
            return self._answered(push, "known" if known else "late")
        gradients = None if known else self._read(push, tensors)
        self._collected.add(push.step, push.sender.worker, push.optimizer, gradients)
        if known:
            self._repeated(push)
        else:
            self._ledger.enter(push.sender, push.key)
            self._note(tensors, self._values.version - push.read_version)
        self.expect(push.step, push.completes)
        if not push.pull:
            return self._answered(push, "known" if known else "applied")
        return self.once_applied(push.step, lambda: self._answered(push, "known" if known else "applied"))

    def _apply_complete(self) -> None:
        while (means := self._collected.take()) is not None:
            self._meter.steps += 1
            self._apply(means)

    def _read(self, push: Push, tensors: Sequence[torch.Tensor]) -> ServerGradients:
        gradients = read_gradients(push, tensors, self._values)
        optimizer = self._optimizer(push.optimizer)
        optimizer.require_known(gradients)
        if push.options is not None:
            optimizer.change_options(push.options)
        return gradients

    def _optimizer(self, handle: int) -> ServedOptimizer:
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

    def _write(self, assign: Assign, tensors: Sequence[torch.Tensor]) -> None:
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
            self._meter.apply_seconds += time.perf_counter() - begin

    def _note(self, tensors: Sequence[torch.Tensor], behind: int | None) -> None:
        self._meter.pushes += 1
        self._meter.bytes_pushed += sum(tensor.nbytes for tensor in tensors)
        if behind is not None:
            self._meter.note_staleness(behind)

    def _repeated(self, change: Push | Assign | WriteStates) -> None:
        self._meter.repeated += 1
        self._ledger.enter(change.sender, change.key)  # for the key's `finished_below`

    def _answered(self, push: Push, verdict: Verdict) -> Answered:
        tensors = [self._values.value(number) for number in push.pull]
        if tensors:
            self._meter.pulls += 1
            self._meter.bytes_pulled += sum(tensor.nbytes for tensor in tensors)
        return ServerAnswer(self._values.version, verdict, self.step), tensors
