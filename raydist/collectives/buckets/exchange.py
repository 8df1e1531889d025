"""The exchange of one backward pass: full buckets travel at once, while the rest is still computed.

Buckets are sent in their order, which is the same on every rank whatever order gradients appear in. The last one waits
for the end of the pass; its tail tells everybody whether a second round is needed for gradients that appeared again
after their bucket had left (a parameter used inside and outside of a reentrant checkpoint, say).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVarTuple, final

import torch

from raydist.collectives.base import Communicator, Work
from raydist.collectives.buckets.buffer import BucketBuffer
from raydist.collectives.buckets.forms import GlobalGradient, StepWeight
from raydist.collectives.buckets.layout import BucketLayout
from raydist.collectives.buckets.lazy_buffer import LazyBuffer
from raydist.collectives.buckets.sparse_lane import SparseLane
from raydist.collectives.buckets.tail import PassStamp
from raydist.collectives.nonfinite.policy import is_finite
from raydist.values import ReduceOp

__all__ = ["AnyBuffer", "BucketExchange", "is_profiled", "make_buffers"]

AnyBuffer = BucketBuffer | LazyBuffer
_Args = TypeVarTuple("_Args")


@final
class BucketExchange:
    """One backward pass of one rank.

    Args:
        communicator: Carries the buckets; nothing else may use it during the pass.
        layout: The same on all ranks.
        buffers: One per bucket. What was lent of them before must have come back.
        stamp: Which pass this is.
        weight: What becomes of this rank's gradients on the way.
        held: Parameters whose buckets must wait for the end of the pass.
        lane: Carries the gradients of parameters that no bucket has.

    Attributes:
        became_sparse: After `gradients`: parameters in buckets for which a rank had a sparse gradient.
    """

    def __init__(
        self,
        communicator: Communicator,
        layout: BucketLayout,
        buffers: Sequence[AnyBuffer],
        stamp: PassStamp,
        weight: StepWeight,
        *,
        held: Collection[int] = (),
        lane: SparseLane | None = None,
    ) -> None:
        self.became_sparse: frozenset[int] = frozenset()
        self._lane = lane
        self.layout = layout
        self.late: dict[int, torch.Tensor] = {}
        self.local: list[list[torch.Tensor | None]] = [[None] * len(bucket.slots) for bucket in layout.buckets]
        self._communicator = communicator
        self._buffers = buffers
        self._stamp = stamp
        self._encoded = stamp.encode()
        self._weight = weight
        self._preloaded: dict[int, torch.Tensor] = {}
        self._num_missing = [len(bucket.slots) for bucket in layout.buckets]
        self._plain = [weight.counts] * len(layout.buckets)
        self._held = {layout.places[index][0] for index in held if index in layout.places} if held else ()
        self._works: list[Work] = []
        self._lock = threading.Lock()

    def preload(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient of an earlier, local pass, weighted already; its bucket still waits for this pass's."""
        if index not in self.layout.places and self._lane is not None:
            self._lane.preloaded[index] = gradient
            return
        self._preloaded[index] = gradient
        self._plain[self.layout.places[index][0]] = False

    def put(self, index: int, gradient: torch.Tensor) -> None:
        """A parameter's own gradient has appeared. May happen again, and is kept as it is in `local`."""
        if index not in self.layout.places and self._lane is not None:
            with self._lock:
                self._lane.put(index, gradient)
            return
        number, position = self.layout.places[index]
        # Parameters on several devices have their gradients from several threads of the autograd engine.
        with self._lock:
            held = self.local[number]
            before = held[position]
            held[position] = gradient if before is None else before + gradient
            if number < len(self._works):
                self._put_late(index, gradient)
                return
            if gradient.is_sparse or gradient.requires_grad:
                self._plain[number] = False
            if before is None:
                self._num_missing[number] -= 1
                if not self._num_missing[number]:
                    self._launch_full()

    @property
    def leaves_at_end(self) -> bool:
        """Whether nothing travels before the end of the pass: then `put_all` takes all gradients, with less to do."""
        return len(self.layout.buckets) == 1 and self._lane is None

    def put_all(self, gradients: Iterable[tuple[int, torch.Tensor]]) -> None:
        """What a pass that `leaves_at_end` has brought, each parameter's own gradient once."""
        places, held = self.layout.places, self.local[0]
        for index, gradient in gradients:
            held[places[index][1]] = gradient
            self._num_missing[0] -= 1
            if gradient.is_sparse or gradient.requires_grad:
                self._plain[0] = False

    def take_over(self, work: Work) -> None:
        """The first bucket has been sent for this pass already."""
        self._works.append(work)

    def finish(self) -> None:
        """Send what is left and wait for everything.

        Blocking: until all ranks have ended their pass, at most the communicator's limit.

        Raises:
            CollectiveMismatchError: On every rank alike: they are not in the same backward pass.
        """
        with self._lock:
            while len(self._works) < len(self.layout.buckets):
                self._launch(len(self._works))
        for number, (work, buffer) in enumerate(zip(self._works, self._buffers, strict=True)):
            _traced("raydist::wait for bucket", number, work.wait)
            buffer.tail.read()  # before the next wait: ranks that do not fit together send no more
            buffer.unpack()
        if self._lane is not None:
            self._lane.finish()

    def drain(self) -> None:
        """Wait for what has been sent: afterwards nobody writes into the buffers any more."""
        for work in self._works:
            work.wait()

    @property
    def complete(self) -> bool:
        """After `finish`: whether every rank had every gradient once, all dense; then `lend` says it all."""
        return all(buffer.tail.complete and not buffer.tail.late for buffer in self._buffers)

    def lend(self) -> Sequence[tuple[tuple[int, ...], Sequence[torch.Tensor]]]:
        """By bucket: its parameters, and their reduced gradients."""
        return [(buffer.bucket.indices, buffer.lend()) for buffer in self._buffers]

    def gradients(self) -> dict[int, GlobalGradient]:
        """After `finish`: parameter index -> gradient; those that no rank has are left out.

        Blocking: where gradients were late, for a second round.
        """
        found = self._collect()
        self.became_sparse = frozenset(index for index, gradient in found.items() if gradient.sparse)
        if self._buffers and self._buffers[-1].tail.late:
            _add_late(found, self._second_round())
        return found

    def in_rows(self) -> dict[int, torch.Tensor]:
        """After `finish`: parameter index -> gradient, of those that no bucket has."""
        return {} if self._lane is None else self._lane.reduced

    def is_finite(self) -> bool:
        """After `gradients` or `lend`: whether neither NaN nor infinities came out."""
        return all(buffer.is_finite() for buffer in self._buffers) and all(map(is_finite, self.in_rows().values()))

    def own_gradients(self) -> dict[int, list[torch.Tensor]]:
        """Parameter index -> what of this rank counts in it."""
        own: dict[int, list[torch.Tensor]] = {}
        for index, (number, position) in self.layout.places.items():
            local, preloaded = self.local[number][position], self._preloaded.get(index)
            found = [local.detach()] if local is not None and self._weight.counts else []
            own[index] = [*found, *([] if preloaded is None else [preloaded])]
        if self._lane is not None:
            new = self._lane.local if self._weight.counts else {}
            for index in self._lane.indices:
                own[index] = [held[index].detach() for held in (new, self._lane.preloaded) if index in held]
        return own

    def _put_late(self, index: int, gradient: torch.Tensor) -> None:
        if self._weight.counts:
            weighted = gradient.detach().to_dense() * self._weight.scale
            before = self.late.get(index)
            self.late[index] = weighted if before is None else before.add_(weighted)

    def _launch_full(self) -> None:
        last = len(self.layout.buckets) - 1
        while (number := len(self._works)) < last and not self._num_missing[number] and number not in self._held:
            self._launch(number)

    def _launch(self, number: int) -> None:
        _traced("raydist::bucket", number, self._send, number, self._buffers[number])

    def _send(self, number: int, buffer: AnyBuffer) -> None:
        details = self._fill(number, buffer)
        buffer.pack()
        buffer.tail.write(self._encoded, late=bool(self.late), details=details)
        self._works.append(self._communicator.all_reduce(buffer.flat, ReduceOp.SUM))

    def _fill(self, number: int, buffer: AnyBuffer) -> tuple[list[bool], list[bool]] | None:
        """Copy this rank's gradients in; what must be told of them where they are not all there, all dense."""
        local = self.local[number]
        if self._plain[number] and not self._num_missing[number]:
            buffer.fill(local, self._weight.scale)  # type: ignore[arg-type]  # none is missing
            return None
        kept = [None if gradient is None or not self._weight.counts else gradient.detach() for gradient in local]
        buffer.fill_some(kept, self._weight.scale)
        for position, index in enumerate(buffer.bucket.indices):
            if index in self._preloaded:
                buffer.add(position, self._preloaded[index])
        present = [
            gradient is not None or index in self._preloaded
            for gradient, index in zip(kept, buffer.bucket.indices, strict=True)
        ]
        pairs = zip(kept, map(self._preloaded.get, buffer.bucket.indices), strict=True)
        return present, [any(one is not None and one.is_sparse for one in pair) for pair in pairs]

    def _collect(self) -> dict[int, GlobalGradient]:
        found: dict[int, GlobalGradient] = {}
        for buffer in self._buffers:
            rows = zip(buffer.bucket.indices, buffer.lend(), *buffer.tail.details(), strict=True)
            found |= {index: GlobalGradient(value, sparse) for index, value, present, sparse in rows if present}
        return found

    def _second_round(self) -> dict[int, GlobalGradient]:
        plain = [
            torch.empty(buffer.flat.numel(), dtype=buffer.flat.dtype, device=buffer.flat.device)
            for buffer in self._buffers
        ]
        buffers = make_buffers(self.layout, plain, self._communicator)
        again = BucketExchange(self._communicator, self.layout, buffers, self._stamp, StepWeight(1.0, counts=True))
        for index, gradient in self.late.items():
            again.put(index, gradient)
        again.finish()
        return again.gradients()


def make_buffers(
    layout: BucketLayout, flats: Sequence[torch.Tensor], communicator: Communicator
) -> tuple[AnyBuffer, ...]:
    """Buffers for a layout in these flat tensors."""
    rank, world_size = communicator.rank, communicator.world_size
    pairs = zip(layout.buckets, flats, strict=True)
    return tuple(
        (LazyBuffer if flat.device.type == "xla" else BucketBuffer)(bucket, flat, rank=rank, world_size=world_size)
        for bucket, flat in pairs
    )


def _add_late(gradients: dict[int, GlobalGradient], late: dict[int, GlobalGradient]) -> None:
    for index, gradient in late.items():
        if index in gradients:
            gradients[index].value.add_(gradient.value)
        else:
            gradients[index] = gradient


is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether torch.profiler writes a trace."""


def _traced(name: str, number: int, do: Callable[[*_Args], None], *args: *_Args) -> None:
    """Call `do`, as a range in the traces of torch.profiler; entering one costs 5 us even while nobody traces."""
    if is_profiled():
        with torch.profiler.record_function(f"{name} {number}"):
            do(*args)
    else:
        do(*args)
