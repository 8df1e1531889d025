"""The gradient exchange of one backward pass: full buckets are reduced while the pass still runs.

All ranks send buckets in the same fixed order, whatever order gradients appear in. The last bucket waits for the end of
the pass and contains the trailer (`trailer.py`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.reducer.buckets import BucketMemory, BucketPlan, Buckets
from raydist.collectives.reducer.known_gradients import Checksums, compare
from raydist.collectives.reducer.nonfinite import fault_of, is_finite
from raydist.collectives.reducer.sparse_rows import reduce_rows
from raydist.collectives.reducer.trailer import ReceivedTrailer
from raydist.core.errors import FailedPreconditionError
from raydist.core.values import ReduceOp


@final
@dataclass(frozen=True, slots=True)
class StepWeight:
    """Weight of this rank's new gradients in a step."""

    scale: float  # factor of the gradients
    counts: bool  # False where this rank's gradients count as zero, even NaN


@final
class Exchange:
    """The exchange of one backward pass of one rank.

    Args:
        communicator: Reduces the buckets; nothing else may use it during the pass.
        checksum: Checksum of gradients that the program has changed since the last pass; None for none.
        earlier: Weighted gradients of earlier local passes, which are added, by parameter. A bucket still waits for the
            gradients of this pass.
        hold_with: Parameters whose buckets are not sent before the end of the pass.
    """

    def __init__(
        self,
        communicator: Communicator,
        buckets: Buckets,
        plan: BucketPlan,
        stamp: bytes,
        checksum: torch.Tensor | None,
        weight: StepWeight,
        *,
        earlier: Mapping[int, torch.Tensor] | None = None,
        hold_with: Collection[int] = (),
    ) -> None:
        self.local: dict[int, torch.Tensor] = {}  # this rank's own gradients, by parameter
        self.repeated: set[int] = set()  # parameters that have got more than one gradient in the pass
        self._communicator = communicator
        self._plan = plan
        self._compression = buckets.compression
        self._works = buckets.works
        self._memory = plan.free_memory()  # None in the first pass of a plan
        self._stamp = stamp
        self._checksum = checksum
        self._weight = weight
        self._earlier = earlier or {}
        layout = () if self._memory is None else self._memory.layout
        self._numbers = {} if self._memory is None else self._memory.numbers
        self._num_missing = [len(bucket.specs) for bucket in layout]
        self._held = {self._numbers.get(index) for index in hold_with}
        self._hold = len(layout) <= 1
        self._num_sent = 0
        self._rows: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Send no further bucket before the end of the pass, since a parameter may get several gradients."""
        self._hold = True

    def put(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient of this pass, and send buckets that are full now.

        Raises:
            FailedPreconditionError: The bucket was sent already, with an earlier gradient of the same parameter.
        """
        # With parameters on several devices, several threads of the autograd engine call this.
        with self._lock:
            number = self._numbers.get(index)
            if index in self.local:
                self._put_again(index, gradient, number)
                return
            self.local[index] = gradient
            if number is not None:
                self._num_missing[number] -= 1
                while not self._num_missing[number] and not self._hold and self._is_full(self._num_sent):
                    self._send(self._num_sent)

    def _put_again(self, index: int, gradient: torch.Tensor, number: int | None) -> None:
        if number is not None and number < self._num_sent:
            raise FailedPreconditionError(
                "A parameter must have its gradient once in a backward pass, or as often as in the first pass, but "
                f"that of parameter {index} has come again after it was sent. Give torch.utils.checkpoint.checkpoint "
                "use_reentrant=False, or run the part that uses the parameter twice in the first step as well."
            )
        self.repeated.add(index)
        self.local[index] = _sum(self.local.pop(index), gradient)  # the last one decides the order of the layout

    def finish(self) -> None:
        """Send the remaining buckets, and let the current stream wait for all of them.

        Blocking: until all ranks have ended their pass, at most the communicator's limit; not where the host runs
        ahead of the device, unless it is the plan's first pass or parameters have sparse gradients.
        """
        with self._lock:
            if self._memory is None:
                held = [*self.local.items(), *self._earlier.items()]
                sparse = {index for index, gradient in held if gradient.is_sparse}
                self._memory = self._plan.settle(list(self.local), sparse)
                self._numbers = self._memory.numbers
            while self._num_sent < len(self._memory.buckets):
                self._send(self._num_sent)
        for number, work in enumerate(self._works):
            with torch.profiler.record_function(f"raydist::wait for bucket {number}"):
                work.wait()
        self._works.clear()
        for bucket in self._memory.buckets:
            bucket.unpack()
        if specs := self._plan.row_specs:
            own = {spec.index: self.weighted(spec.index) for spec in specs}
            self._rows = reduce_rows(self._communicator, specs, own, self._compression)

    @property
    def is_whole(self) -> bool:
        """True where this rank has a new gradient for every parameter, so it needs no flags of the trailer."""
        return self._weight.counts and self._numbers.keys() <= self.local.keys()

    def read_trailer(self) -> Callable[[], ReceivedTrailer] | None:
        """After `finish`, begin to copy the trailer to the host. The returned function blocks until it has arrived."""
        trailer = None if self._memory is None else self._memory.trailer
        if trailer is None:
            return None
        arrived = self._communicator.copy_to_host(trailer.memory)
        return lambda: trailer.received(arrived())

    def gradients(self, present: Sequence[bool] | None = None) -> dict[int, torch.Tensor]:
        """After `finish`, return parameter index -> reduced gradient.

        Args:
            present: For each parameter in buckets, True if any rank has a gradient; None if that holds for all.
        """
        found: dict[int, torch.Tensor] = {}
        for memory in self._buckets():
            found.update(zip(memory.bucket.indices, memory.gradients(), strict=True))
        if present is not None:
            found = {index: found[index] for index, there in zip(tuple(found), present, strict=True) if there}
        return found | self._rows

    def is_finite(self) -> bool:
        """Return True if the reduced gradients are finite. To be called after `finish`. Waits for the device."""
        return all(memory.is_finite() for memory in self._buckets()) and all(map(is_finite, self._rows.values()))

    def locate_faults(self, indices: Iterable[int]) -> list[dict[int, int]]:
        """Return the faults of each replica's own gradients (see `fault_of`). Blocks until all replicas call it."""
        own = {index: self.weighted(index) for index in indices}
        mine = {index: fault for index, each in own.items() if each is not None and (fault := fault_of(each))}
        said = self._communicator.exchange_on_host(json.dumps(mine).encode(), "gradients that are not finite")
        return [{int(index): fault for index, fault in sorted(json.loads(row).items())} for row in said]

    def weighted(self, index: int) -> torch.Tensor | None:
        """Return this rank's contribution to the gradient of a parameter; None for none."""
        new = self.local.get(index) if self._weight.counts else None
        earlier = self._earlier.get(index)
        if new is None:
            return earlier
        weighted = new.detach() * self._weight.scale
        return weighted if earlier is None else _sum(earlier, weighted)

    def connected(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return a differentiable reduced gradient, as of `backward(create_graph=True)`."""
        local = self.local.get(index)
        if gradient.is_sparse or (local is not None and local.is_sparse):
            return gradient
        start = torch.zeros_like(gradient, requires_grad=True) if local is None else local
        apply: Any = _Connected.apply  # torch leaves it untyped
        connected: torch.Tensor = apply(start, gradient.clone(), self._communicator, self._weight)
        return connected

    def _buckets(self) -> Sequence[BucketMemory]:
        return () if self._memory is None else self._memory.buckets

    def _is_full(self, number: int) -> bool:
        """Return True if a bucket has all its gradients; the last bucket always waits for the end of the pass."""
        return number < len(self._num_missing) - 1 and not self._num_missing[number] and number not in self._held

    def _send(self, number: int) -> None:
        memory = self._buckets()[number]
        with torch.profiler.record_function(f"raydist::bucket {number}"):
            weighs_first = bool(self._earlier) or not self._weight.counts
            found = map(self.weighted if weighs_first else self.local.get, memory.bucket.indices)
            gradients = [
                one.detach().to_dense() if one is not None and (one.is_sparse or one.requires_grad) else one
                for one in found
            ]
            memory.fill(gradients, 1.0 if weighs_first else self._weight.scale)
            memory.pack()
            trailer = self._memory.trailer if self._memory is not None else None
            if trailer is not None and number == len(self._buckets()) - 1:
                own = (self.local.keys() if self._weight.counts else set()) | self._earlier.keys()
                present = None if self.is_whole else [index in own for index in self._numbers]
                trailer.write(self._stamp, present=present, checksum=self._checksum)
            self._works.append(self._communicator.all_reduce(memory.flat, ReduceOp.SUM))
        self._num_sent += 1


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one + other if one.is_sparse == other.is_sparse else one.to_dense() + other.to_dense()


class _Connected(torch.autograd.Function):
    """A global gradient that is differentiable with respect to this replica's own gradient.

    G = sum of w_i g_i, and the objective is the sum of w_j L_j(G). The objective's gradient with respect to g_i is
    w_i sum of w_j dL_j/dG; the factor w_i is left out, since the pass that uses the result multiplies by it.
    """

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, value: torch.Tensor, communicator: Communicator, weight: StepWeight
    ) -> torch.Tensor:
        ctx.communicator = communicator
        ctx.weight = weight
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        weight: StepWeight = ctx.weight
        total = upstream * weight.scale if weight.counts else torch.zeros_like(upstream)
        ctx.communicator.all_reduce(total, ReduceOp.SUM).wait()
        return total, None, None, None


@final
class TrailerChecks:
    """Checks of the trailers of a replica's backward passes: of each pass, or where the host runs ahead, of the last.

    Args:
        name_of: Returns the name of a parameter, for messages.
    """

    def __init__(self, communicator: Communicator, name_of: Callable[[int], str]) -> None:
        self._communicator = communicator
        self._name_of = name_of
        self._unchecked: tuple[Callable[[], ReceivedTrailer], list[Checksums]] | None = None

    def check(self, exchange: Exchange, noted: list[Checksums], *, wait: bool) -> Sequence[bool] | None:
        """Check a trailer. Return for each parameter in buckets True if any replica has a gradient; None if all have.

        Args:
            exchange: The pass that has ended.
            noted: Checksums of the gradients that this replica has changed since the last pass.
            wait: True to wait for the trailer of this pass.

        Raises:
            CollectiveMismatchError: Replicas ran different passes, or have changed earlier gradients differently. All
                replicas raise it.
        """
        trailer = exchange.read_trailer()
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is not None:
            self._compare(unchecked[0](), unchecked[1])
        if trailer is None:
            return None
        if not self._communicator.host_runs_ahead:
            received = trailer()
            self._compare(received, noted)
            return received.present
        if exchange.is_whole and not wait:
            self._unchecked = trailer, noted
            return None
        received = trailer()  # other ranks check the trailer in the next pass, and so does this rank
        self._unchecked = (lambda: received), noted
        return received.present

    def _compare(self, received: ReceivedTrailer, noted: list[Checksums]) -> None:
        received.check()
        if received.checksums_differ:
            compare(self._communicator, noted, self._name_of)
