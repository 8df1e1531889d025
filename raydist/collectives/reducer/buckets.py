"""The buckets of one rank: the layout agreed between ranks, and bucket memory that is reused from pass to pass.

Collectives whose sizes differ between ranks do not raise: gloo ends the process, NCCL hangs. So ranks compare their
layouts on the host when the set of trained parameters changes, before a collective uses the new layout.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.reducer.bucket import BucketLayout, ParameterSpec, plan_buckets
from raydist.collectives.reducer.exchange import BucketSet, Exchange, StepWeight
from raydist.collectives.reducer.sparse_rows import SparseRows
from raydist.collectives.reducer.trailer import BACKWARD_ADVICE, PassStamp, agree

__all__ = ["Buckets"]

_MOST_KEPT = 2  # layouts: programs that toggle requires_grad between two models use two in turns


@final
@dataclass(eq=False)
class _Plan:
    """The buckets of one set of trained parameters.

    Attributes:
        specs: The parameters, by number.
        memory: Bucket memory of the passes.
        spare: Bucket memory for a pass during which gradients of an earlier pass still use `memory`.
        seen: Order in which gradients appear in the first pass; None once the layout follows that order.
    """

    specs: dict[int, ParameterSpec]
    memory: BucketSet
    spare: BucketSet | None = None
    seen: dict[int, None] | None = field(default_factory=dict)


@final
class Buckets:
    """The buckets of one rank.

    Args:
        communicator: Reduces the buckets.
        bucket_bytes: Maximum size of a bucket.
        first_bucket_bytes: Size of the first bucket.
        compression: Communication dtype of float32 gradients; None to keep float32.
        expect_rows: Returns the `id` of each parameter whose gradient will be sparse.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        bucket_bytes: int,
        first_bucket_bytes: int,
        compression: torch.dtype | None = None,
        expect_rows: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._expect_rows = expect_rows
        self._communicator = communicator
        self._bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._compression = compression
        self._trained: tuple[int, ...] = ()
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._plan: _Plan | None = None
        self._sparse: frozenset[int] = frozenset()
        self._last: Exchange | None = None

    @property
    def layout(self) -> BucketLayout:
        """The layout that all ranks agree on."""
        return BucketLayout(()) if self._plan is None else self._plan.memory.layout

    @property
    def is_first_pass(self) -> bool:
        """True in the first pass of a layout."""
        return self._plan is not None and self._plan.seen is not None

    def open(
        self,
        trained: tuple[int, ...],
        parameters: Mapping[int, torch.nn.Parameter],
        stamp: PassStamp,
        checksum: torch.Tensor | None,
        weight: StepWeight,
        *,
        hold_with: Collection[int],
    ) -> Exchange:
        """Begin a backward pass and return its exchange.

        Args:
            trained: Numbers of the trained parameters.
            parameters: All parameters, by number.
            stamp: Identification of the pass.
            checksum: Checksum of gradients that the program has changed since the last pass; None for none.
            weight: Factor of this rank's gradients.
            hold_with: Parameters whose buckets are not sent before the end of the pass.

        Blocking: after a change of the trained parameters, until all ranks have begun the pass.

        Raises:
            CollectiveMismatchError: Ranks train different parameters.
        """
        if self._last is not None:  # the previous pass ended with an error
            self._last.drain()
        plan = self._plan
        if plan is None or trained != self._trained:
            plan = self._change(trained, parameters, stamp)
        self._last = Exchange(
            self._communicator,
            self._free_memory(plan),
            stamp.encode(),
            checksum,
            weight,
            hold=plan.seen is not None,
            hold_with=hold_with,
            rows=self._rows(plan, weight) if self._sparse else None,
        )
        return self._last

    def receiver(self, exchange: Exchange) -> Callable[[int, torch.Tensor], None]:
        """Return the function that receives each gradient of a pass when autograd has computed it."""
        seen = None if self._plan is None else self._plan.seen
        return exchange.put if seen is None else functools.partial(_note_and_put, exchange, seen)

    def done(self, became_sparse: frozenset[int]) -> None:
        """End a successful pass. After the first one, ranks agree on a layout in the order in which gradients appeared.

        Args:
            became_sparse: Parameters in buckets for which a rank had a sparse gradient, the same on all ranks. From now
                on only rows of these gradients are exchanged.

        Blocking: where the layout changes, until all ranks have ended the pass.
        """
        self._last = None
        plan = self._plan
        if plan is None or (plan.seen is None and not became_sparse):
            return
        seen, plan.seen = plan.seen, None
        if became_sparse:
            self._sparse |= became_sparse
            self._plans = {self._trained: plan}
        if seen and len(plan.memory.buckets) > 1:
            self._reorder(plan, list(seen))
        elif became_sparse:
            order = [slot.spec for bucket in plan.memory.layout.buckets for slot in bucket.slots]
            self._lay_out(plan, self._planned(order[::-1]))

    def _change(
        self, trained: tuple[int, ...], parameters: Mapping[int, torch.nn.Parameter], stamp: PassStamp
    ) -> _Plan:
        plan = self._plans.pop(trained, None)
        layout = plan.memory.layout if plan is not None else None
        specs = {index: ParameterSpec.of(index, parameters[index]) for index in trained} if plan is None else plan.specs
        if layout is None:
            expected = self._expect_rows()
            self._sparse |= {  # XLA has no sparse tensors
                index for index in trained if id(parameters[index]) in expected and specs[index].device.type != "xla"
            }
            layout = self._planned(list(specs.values()))
        numbers = {
            "step": stamp.step,
            "backward pass": stamp.backward,
            "trained parameters": len(trained),
            "layout of trained parameters": layout.fingerprint,
        }
        agree(self._communicator, "the backward pass", numbers, BACKWARD_ADVICE)
        if plan is None:
            plan = _Plan(specs, self._allocate(layout))
        self._plans[trained] = self._plan = plan
        if len(self._plans) > _MOST_KEPT:
            del self._plans[next(iter(self._plans))]
        self._trained = trained
        return plan

    def _reorder(self, plan: _Plan, seen: list[int]) -> None:
        """Lay out in the order in which gradients appeared on rank 0; parameters without a gradient there come last."""
        unseen = [index for index in reversed(self._trained) if index not in set(seen)]
        mine = json.dumps([*seen, *unseen]).encode() if self._communicator.rank == 0 else b""
        order = json.loads(self._communicator.exchange_on_host(mine, "the order of gradients")[0])
        self._lay_out(plan, self._planned([plan.specs[index] for index in reversed(order)]))

    def _lay_out(self, plan: _Plan, layout: BucketLayout) -> None:
        if layout != plan.memory.layout:
            plan.memory, plan.spare = self._allocate(layout), None

    def _planned(self, specs: Sequence[ParameterSpec]) -> BucketLayout:
        return plan_buckets(
            [spec for spec in specs if spec.index not in self._sparse],
            bucket_bytes=self._bucket_bytes,
            first_bucket_bytes=self._first_bucket_bytes,
            compression=self._compression,
        )

    def _allocate(self, layout: BucketLayout) -> BucketSet:
        """Allocate bucket memory. All ranks call this together, since the memory may be shared."""
        group = self._communicator
        flats = group.allocate(BucketSet.sizes(layout, group.world_size))
        placed = [flat.to(bucket.device) for flat, bucket in zip(flats, layout.buckets, strict=True)]
        return BucketSet(layout, placed, rank=group.rank, world_size=group.world_size)

    def _free_memory(self, plan: _Plan) -> BucketSet:
        """Return bucket memory that no tensor refers to: `memory`, or the spare one while gradients use `memory`."""
        if plan.memory.is_free():
            return plan.memory
        if plan.spare is None or not plan.spare.is_free():
            flats = [torch.empty_like(bucket.flat) for bucket in plan.memory.buckets]
            group = self._communicator
            plan.spare = BucketSet(plan.memory.layout, flats, rank=group.rank, world_size=group.world_size)
        return plan.spare

    def _rows(self, plan: _Plan, weight: StepWeight) -> SparseRows:
        specs = [plan.specs[index] for index in self._trained if index in self._sparse]
        return SparseRows(
            self._communicator, specs, scale=weight.scale, counts=weight.counts, compression=self._compression
        )


def _note_and_put(exchange: Exchange, seen: dict[int, None], index: int, gradient: torch.Tensor) -> None:
    """Put a gradient into the exchange, and record the order of gradients for the next layout."""
    seen.pop(index, None)
    seen[index] = None
    exchange.put(index, gradient)
