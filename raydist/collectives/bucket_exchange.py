"""The exchange of one backward pass: gradients go into buckets as they appear, full buckets travel at once.

Buckets are sent in their order, which is the same on every rank whatever order gradients appear in. The last one waits
for the end of the pass; its late flag tells everybody whether a second round is needed for gradients that appeared
again after their bucket had left (a parameter used inside and outside of a reentrant checkpoint, say).
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.agreement import Agreement
from raydist.collectives.base import Communicator, Work
from raydist.collectives.buckets import BucketLayout
from raydist.values import ReduceOp

__all__ = ["GlobalGradient", "BucketExchange", "allocate"]


@final
@dataclass(frozen=True, slots=True)
class GlobalGradient:
    """The reduced gradient of one parameter, one that at least one rank has.

    Attributes:
        value: Dense, of the parameter's shape; memory that the next backward pass overwrites.
        sparse: Whether a rank had it as a sparse tensor.
    """

    value: torch.Tensor
    sparse: bool


@final
class BucketExchange:
    """One backward pass of one rank.

    Args:
        communicator: Carries the buckets; nothing else may use it during the pass.
        layout: The same on all ranks.
        buffers: One flat tensor per bucket, of its size.
        held: Parameters whose buckets must wait for the end of the pass.
        agreement: A collective that must have succeeded before the first bucket may leave.
    """

    def __init__(
        self,
        communicator: Communicator,
        layout: BucketLayout,
        buffers: list[torch.Tensor],
        *,
        held: Collection[int] = (),
        agreement: Agreement | None = None,
    ) -> None:
        self.layout = layout
        self.late: dict[int, torch.Tensor] = {}
        self._communicator = communicator
        self._buffers = buffers
        self._agreement = agreement
        self._present: list[list[int]] = [[0] * len(bucket.slots) for bucket in layout.buckets]
        self._sparse: list[list[int]] = [[0] * len(bucket.slots) for bucket in layout.buckets]
        self._missing = [{slot.spec.index for slot in bucket.slots} for bucket in layout.buckets]
        self._held = {layout.places[index][0] for index in held if index in layout.places}
        self._works: list[Work] = []
        self._lock = threading.Lock()

    def preload(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient of an earlier, local pass; its bucket still waits for this pass's."""
        with self._lock:
            self._add(index, gradient, 1.0)

    def put(self, index: int, gradient: torch.Tensor | None, *, scale: float = 1.0, sparse: bool = False) -> None:
        """A parameter's dense gradient has appeared (None: it appeared but counts nothing). May happen again.

        Args:
            index: The parameter.
            gradient: Copied, or multiplied by `scale` on the way.
            scale: This rank's weight.
            sparse: Whether the gradient was a sparse tensor.
        """
        bucket, position = self.layout.places[index]
        # Parameters on several devices have their gradients from several threads of the autograd engine.
        with self._lock:
            if gradient is not None:
                self._add(index, gradient, scale)
                self._sparse[bucket][position] |= int(sparse)
            self._missing[bucket].discard(index)
            self._launch_full()

    def finish(self) -> dict[int, GlobalGradient]:
        """Send what is left and wait for everything: parameter index -> gradient; ranks without any are left out.

        Blocking: until all ranks have ended their pass, at most the communicator's limit.
        """
        self._await_agreement()
        with self._lock:
            while len(self._works) < len(self.layout.buckets):
                self._launch(len(self._works))
        for work in self._works:
            work.wait()
        gradients = self._collect()
        if self._somebody_late():
            _add_late(gradients, self._second_round())
        return gradients

    def _add(self, index: int, gradient: torch.Tensor, scale: float) -> None:
        number, position = self.layout.places[index]
        if number < len(self._works):
            before = self.late.get(index)
            self.late[index] = gradient * scale if before is None else before.add_(gradient, alpha=scale)
            return
        view = self._view(number, position)
        if self._present[number][position]:
            view.add_(gradient, alpha=scale)
        elif scale == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, scale, out=view)
        self._present[number][position] = 1

    def _launch_full(self) -> None:
        last = len(self.layout.buckets) - 1
        while (number := len(self._works)) < last and not self._missing[number] and number not in self._held:
            self._launch(number)

    def _launch(self, number: int) -> None:
        self._await_agreement()
        for position, present in enumerate(self._present[number]):
            if not present:
                self._view(number, position).zero_()
        bucket, buffer = self.layout.buckets[number], self._buffers[number]
        flags = [*self._present[number], *self._sparse[number], int(bool(self.late))]
        buffer[bucket.numel :] = torch.tensor(flags, dtype=buffer.dtype, device=buffer.device)
        self._works.append(self._communicator.all_reduce(buffer, ReduceOp.SUM))

    def _await_agreement(self) -> None:
        if self._agreement is not None:
            self._agreement.wait()
            self._agreement = None

    def _view(self, number: int, position: int) -> torch.Tensor:
        slot = self.layout.buckets[number].slots[position]
        return self._buffers[number][slot.offset : slot.offset + slot.spec.numel].view(slot.spec.shape)

    def _collect(self) -> dict[int, GlobalGradient]:
        gradients = {}
        for number, bucket in enumerate(self.layout.buckets):
            flags = self._buffers[number][bucket.numel :].tolist()
            for position, slot in enumerate(bucket.slots):
                if flags[position] > 0:
                    sparse = flags[len(bucket.slots) + position] > 0
                    gradients[slot.spec.index] = GlobalGradient(self._view(number, position), sparse)
        return gradients

    def _somebody_late(self) -> bool:
        return bool(self._buffers) and bool(self._buffers[-1][-1].item() > 0)

    def _second_round(self) -> dict[int, GlobalGradient]:
        again = BucketExchange(self._communicator, self.layout, allocate(self.layout))
        for index, gradient in self.late.items():
            again.put(index, gradient)
        return again.finish()


def allocate(layout: BucketLayout) -> list[torch.Tensor]:
    """Uninitialised flat tensors for a layout."""
    return [torch.empty(bucket.size, dtype=bucket.dtype, device=bucket.device) for bucket in layout.buckets]


def _add_late(gradients: dict[int, GlobalGradient], late: dict[int, GlobalGradient]) -> None:
    for index, gradient in late.items():
        if index in gradients:
            gradients[index].value.add_(gradient.value)
        else:
            gradients[index] = gradient
