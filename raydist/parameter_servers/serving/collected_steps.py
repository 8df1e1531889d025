"""SyncWithBackups: gradients of a step until all of them have come. Single-threaded, on every server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch

from raydist.parameter_servers.serving.gradients import PushedRows, ServerGradients

__all__ = ["CollectedSteps"]


@final
class CollectedSteps:
    """Incomplete steps, and the sums of the gradients that have come for them.

    A step is complete when each of its workers has pushed, or is known to be dead.
    """

    def __init__(self) -> None:
        self._steps: dict[int, _CollectedStep] = {}
        self._spare = _SpareMemory()
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
            mine.sums.setdefault(optimizer, _GradientSum(self._spare)).add(gradients)

    def drop(self, step: int, worker: int) -> None:
        """Do not wait for a worker in this step."""
        if step >= self.step:
            self._of(step).came.add(worker)

    def take(self) -> Mapping[int, ServerGradients] | None:
        """Return the means of the present step by optimizer, and go on to the next step; None if it is incomplete.

        The means are valid until the next call.
        """
        present = self._steps.get(self.step)
        if present is None or not present.completes or len(present.came) < present.completes:
            return None
        del self._steps[self.step]
        self.step += 1
        self._spare.all_free()
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
class _SpareMemory:
    """Reusable tensors for sums: new memory costs more than the additions."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self._given: list[tuple[int, torch.Tensor]] = []

    def copy_of(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        free = self._free.get(number)
        return free.pop().copy_(gradient) if free else gradient.clone()

    def give(self, number: int, total: torch.Tensor) -> None:
        """Mark a sum that was returned as a mean: the next `all_free` frees it."""
        self._given.append((number, total))

    def all_free(self) -> None:
        for number, total in self._given:
            self._free.setdefault(number, []).append(total)
        self._given.clear()


@final
class _GradientSum:
    """The sum of one optimizer's gradients, in memory of its own."""

    def __init__(self, spare: _SpareMemory) -> None:
        self._spare = spare
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
                self._dense[number] = self._spare.copy_of(number, gradient)
        for handle, rows in gradients.tables.items():
            self._tables.setdefault(handle, []).append(_kept(rows))

    def mean(self) -> ServerGradients:
        """Return the mean over all pushes; a push without a gradient for a slice counts as zeros there."""
        slices: dict[int, torch.Tensor | PushedRows] = {}
        for number, total in self._dense.items():
            for rows in self._rows.pop(number, ()):
                total.index_add_(0, rows.rows, rows.values)
            slices[number] = total.div_(self._count)
            self._spare.give(number, total)
        slices |= {number: self._joined(rows) for number, rows in self._rows.items()}
        return ServerGradients(slices, {handle: self._joined(rows) for handle, rows in self._tables.items()})

    def _joined(self, parts: list[PushedRows]) -> PushedRows:
        values = torch.cat([part.values for part in parts]).div_(self._count)
        return PushedRows(torch.cat([part.rows for part in parts]), values)


def _kept(rows: PushedRows) -> PushedRows:
    return PushedRows(rows.rows.clone(), rows.values.clone())
