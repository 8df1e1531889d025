"""The gradient exchange of one backward pass: full buckets are reduced while the pass still runs.

All ranks send buckets in the same fixed order, whatever order gradients appear in. The last bucket waits for the end of
the pass and contains the trailer (`trailer.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.base import Communicator, Work
from raydist.collectives.reducer.bucket import BucketLayout, BucketMemory, memory_of
from raydist.collectives.reducer.nonfinite import is_finite
from raydist.collectives.reducer.sparse_rows import SparseRows
from raydist.collectives.reducer.trailer import ReceivedTrailer, Trailer
from raydist.errors import FailedPreconditionError
from raydist.values import ReduceOp

__all__ = ["BucketSet", "Exchange", "StepWeight"]


@final
@dataclass(frozen=True, slots=True)
class StepWeight:
    """Weight of this rank's new gradients in a step.

    Attributes:
        scale: Factor of the gradients.
        counts: False where this rank's gradients count as zero, even NaN.
    """

    scale: float
    counts: bool


@final
class BucketSet:
    """The memory of all buckets of a layout, with the trailer at the end of the last bucket.

    Args:
        layout: The buckets.
        flats: One flat tensor for each bucket, of `sizes(...)` elements.
        rank: Number of this rank.
        world_size: Number of ranks.
    """

    def __init__(self, layout: BucketLayout, flats: Sequence[torch.Tensor], *, rank: int, world_size: int) -> None:
        self.layout = layout
        self.buckets: tuple[BucketMemory, ...] = tuple(map(memory_of, layout.buckets, flats))
        last = layout.buckets[-1].numel if layout.buckets else 0
        memory = flats[-1][last:] if flats else torch.empty(0)
        self.trailer = Trailer(memory, len(layout.places), rank=rank, world_size=world_size) if flats else None

    @staticmethod
    def sizes(layout: BucketLayout, world_size: int) -> list[tuple[int, torch.dtype]]:
        """Return the number of elements and the dtype of each flat tensor."""
        numels = [bucket.numel for bucket in layout.buckets]
        if numels:
            numels[-1] += Trailer.size(len(layout.places), world_size)
        return [(numel, bucket.wire) for numel, bucket in zip(numels, layout.buckets, strict=True)]

    def is_free(self) -> bool:
        """Return True if no gradient refers to the memory any more."""
        return all(bucket.is_free() for bucket in self.buckets)


@final
class Exchange:
    """The exchange of one backward pass of one rank.

    Args:
        communicator: Reduces the buckets; nothing else may use it during the pass.
        memory: Memory of the buckets, to which no gradient may refer.
        stamp: Encoded `PassStamp` of the pass.
        checksum: Checksum of gradients that the program has changed since the last pass; None for none.
        weight: Weight of this rank's gradients.
        hold: Send no bucket before the end of the pass.
        hold_with: Parameters whose buckets are not sent before the end of the pass.
        rows: Exchange of the sparse gradients, which are in no bucket.

    Attributes:
        local: This rank's own gradients, by bucket and slot.
        repeated: Parameters that have got more than one gradient in the pass.
    """

    def __init__(
        self,
        communicator: Communicator,
        memory: BucketSet,
        stamp: bytes,
        checksum: torch.Tensor | None,
        weight: StepWeight,
        *,
        hold: bool = False,
        hold_with: Iterable[int] = (),
        rows: SparseRows | None = None,
    ) -> None:
        self.layout = memory.layout
        self.repeated: set[int] = set()
        self.local: list[list[torch.Tensor | None]] = [[None] * len(bucket.slots) for bucket in self.layout.buckets]
        self._communicator = communicator
        self._memory = memory
        self._stamp = stamp
        self._checksum = checksum
        self._weight = weight
        self._rows = rows
        self._preloaded: dict[int, torch.Tensor] = {}
        self._num_missing = [len(bucket.slots) for bucket in self.layout.buckets]
        self._plain = [weight.counts] * len(self.layout.buckets)  # all gradients are dense and need no grad
        self._all_dense = True
        self._held = {self.layout.places[index][0] for index in hold_with if index in self.layout.places}
        self._hold = hold or len(self.layout.buckets) == 1
        self._works: list[Work] = []
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Send no further bucket before the end of the pass, since a parameter may get several gradients."""
        self._hold = True

    def preload(self, index: int, gradient: torch.Tensor) -> None:
        """Add a weighted gradient of an earlier local pass. The bucket still waits for the gradient of this pass."""
        if index not in self.layout.places and self._rows is not None:
            self._rows.preloaded[index] = gradient
            return
        self._preloaded[index] = gradient
        self._plain[self.layout.places[index][0]] = False
        self._all_dense &= not gradient.is_sparse

    def put(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient of this pass, and send buckets that are full now.

        Raises:
            FailedPreconditionError: The bucket was sent already, with an earlier gradient of the same parameter.
        """
        if index not in self.layout.places and self._rows is not None:
            with self._lock:
                self._rows.put(index, gradient)
            return
        number, position = self.layout.places[index]
        # With parameters on several devices, several threads of the autograd engine call this.
        with self._lock:
            before = self.local[number][position]
            if before is not None:
                self._put_again(index, number)
            self.local[number][position] = gradient if before is None else before + gradient
            self._note_kind(number, gradient)
            if before is None:
                self._num_missing[number] -= 1
                if not self._num_missing[number] and not self._hold:
                    self._send_full()

    def _put_again(self, index: int, number: int) -> None:
        self.repeated.add(index)
        if number < len(self._works):
            raise FailedPreconditionError(
                "A parameter must have its gradient once in a backward pass, or as often as in the first pass, but "
                f"that of parameter {index} has come again after it was sent. Give torch.utils.checkpoint.checkpoint "
                "use_reentrant=False, or run the part that uses the parameter twice in the first step as well."
            )

    @property
    def leaves_at_end(self) -> bool:
        """True where nothing is sent before the end of the pass, so that `put_all` may take all gradients at once."""
        return len(self.layout.buckets) == 1 and self._rows is None

    def put_all(self, gradients: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Add all gradients of a pass at once, one for each parameter. Requires `leaves_at_end`."""
        places, held = self.layout.places, self.local[0]
        for index, gradient in gradients:
            held[places[index][1]] = gradient
            self._num_missing[0] -= 1
            self._note_kind(0, gradient)

    def _note_kind(self, number: int, gradient: torch.Tensor) -> None:
        if gradient.is_sparse or gradient.requires_grad:
            self._plain[number] = False
            self._all_dense &= not gradient.is_sparse

    def finish(self) -> None:
        """Send the remaining buckets, and let the current stream wait for all of them.

        Blocking: until all ranks have ended their pass, at most the communicator's limit; not where the host runs
        ahead of the device, unless parameters have sparse gradients.
        """
        with self._lock:
            while len(self._works) < len(self._memory.buckets):
                self._launch(len(self._works))
        for number, work in enumerate(self._works):
            with torch.profiler.record_function(f"raydist::wait for bucket {number}"):
                work.wait()
        for bucket in self._memory.buckets:
            bucket.unpack()
        if self._rows is not None:
            self._rows.finish()

    def drain(self) -> None:
        """Block until the buckets that were sent are reduced; nothing writes into their memory afterwards."""
        for work in self._works:
            work.wait()

    @property
    def is_whole(self) -> bool:
        """True where this rank has a dense gradient for every parameter, so it needs no flags of the trailer."""
        return self._weight.counts and self._all_dense and not any(self._num_missing)

    def read_trailer(self) -> Callable[[], ReceivedTrailer] | None:
        """After `finish`, begin to copy the trailer to the host. The returned function blocks until it has arrived."""
        trailer = self._memory.trailer
        if trailer is None:
            return None
        arrived = self._communicator.copy_to_host(trailer.memory)
        return lambda: trailer.received(arrived())

    def gradients(self) -> dict[int, torch.Tensor]:
        """After `finish`, return parameter index -> reduced gradient, for all parameters in buckets."""
        found: dict[int, torch.Tensor] = {}
        for bucket in self._memory.buckets:
            found.update(zip(bucket.bucket.indices, bucket.gradients(), strict=True))
        return found

    def in_rows(self) -> dict[int, torch.Tensor]:
        """After `finish`, return parameter index -> reduced gradient, for parameters in no bucket."""
        return {} if self._rows is None else self._rows.reduced

    def is_finite(self) -> bool:
        """Return True if the reduced gradients are finite. To be called after `finish`. Waits for the device."""
        return all(bucket.is_finite() for bucket in self._memory.buckets) and all(
            map(is_finite, self.in_rows().values())
        )

    def own_gradients(self) -> dict[int, list[torch.Tensor]]:
        """Return parameter index -> this rank's contributions to the gradient."""
        own: dict[int, list[torch.Tensor]] = {}
        for index, (number, position) in self.layout.places.items():
            local, preloaded = self.local[number][position], self._preloaded.get(index)
            found = [local.detach()] if local is not None and self._weight.counts else []
            own[index] = [*found, *([] if preloaded is None else [preloaded])]
        if self._rows is not None:
            new = self._rows.local if self._weight.counts else {}
            for index in self._rows.indices:
                own[index] = [held[index].detach() for held in (new, self._rows.preloaded) if index in held]
        return own

    def _send_full(self) -> None:
        last = len(self.layout.buckets) - 1
        while (number := len(self._works)) < last and not self._num_missing[number] and number not in self._held:
            self._launch(number)

    def _launch(self, number: int) -> None:
        with torch.profiler.record_function(f"raydist::bucket {number}"):
            self._send(number, self._memory.buckets[number])

    def _send(self, number: int, bucket: BucketMemory) -> None:
        self._fill(number, bucket)
        bucket.pack()
        if number == len(self._memory.buckets) - 1 and self._memory.trailer is not None:
            self._memory.trailer.write(self._stamp, lacking=self._lacking(), checksum=self._checksum)
        self._works.append(self._communicator.all_reduce(bucket.flat, ReduceOp.SUM))

    def _fill(self, number: int, bucket: BucketMemory) -> None:
        """Copy this rank's gradients in."""
        local = self.local[number]
        if self._plain[number] and not self._num_missing[number]:
            bucket.fill(local, self._weight.scale)  # type: ignore[arg-type]  # none is missing
            return
        kept = [None if gradient is None or not self._weight.counts else gradient.detach() for gradient in local]
        bucket.fill_some(kept, self._weight.scale)
        for position, index in enumerate(bucket.bucket.indices):
            if index in self._preloaded:
                bucket.add(position, self._preloaded[index])

    def _lacking(self) -> tuple[list[bool], list[bool]] | None:
        """Return two flags per parameter: has a gradient, has a sparse gradient on this rank; None where `is_whole`."""
        if self.is_whole:
            return None
        own = self.own_gradients()
        parts = [own[slot.spec.index] for bucket in self.layout.buckets for slot in bucket.slots]
        return [bool(each) for each in parts], [any(one.is_sparse for one in each) for each in parts]
