"""The buckets of one rank: the layout that all ranks have agreed on, and memory that is kept from pass to pass.

Collectives whose sizes differ between ranks do not raise: gloo ends the process, NCCL hangs. So ranks compare their
layouts on the host when the set of trained parameters changes, before anything is sent in the new layout.
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

_MOST_KEPT = 2  # layouts: programs that train two models in turns, by requires_grad, go back and forth


@final
@dataclass(eq=False)
class _Plan:
    """The buckets of one set of trained parameters.

    Attributes:
        specs: The parameters, by number.
        memory: Used by the passes.
        spare: Used where gradients of an earlier pass still live in `memory`.
        seen: The order in which gradients appear in the first pass; None once the layout follows it.
    """

    specs: dict[int, ParameterSpec]
    memory: BucketSet
    spare: BucketSet | None = None
    seen: dict[int, None] | None = field(default_factory=dict)


@final
class Buckets:
    """The buckets of one rank.

    Args:
        communicator: Carries them.
        bucket_bytes: Gradients that travel together.
        first_bucket_bytes: Those that travel first.
        compression: The dtype in which float32 gradients travel; None for their own.
        expect_rows: Identities of parameters whose gradients will be sparse.
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
        """Begin a pass.

        Args:
            trained: Numbers of the trained parameters.
            parameters: All parameters, by number.
            stamp: The pass.
            checksum: Of gradients that the program has changed since the pass before; None for none.
            weight: The factor of this rank's gradients.
            hold_with: Parameters whose buckets must wait for the end of the pass.

        Blocking: after a change of the trained parameters, until all ranks have begun the pass.

        Raises:
            CollectiveMismatchError: Ranks train different parameters.
        """
        if self._last is not None:  # an error ended its pass
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
        """Return the function that takes the gradients of a pass as they appear."""
        seen = None if self._plan is None else self._plan.seen
        return exchange.put if seen is None else functools.partial(_note_and_put, exchange, seen)

    def done(self, became_sparse: frozenset[int]) -> None:
        """Note that the pass has ended well. The first one in a layout of several buckets agrees on a better one.

        Args:
            became_sparse: Parameters in buckets for which a rank had a sparse gradient, the same on all ranks: from now
                on their rows travel.

        Blocking: then, until all ranks are there.
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
        """Lay out in the order in which rank 0 saw gradients appear; those that it did not see come last."""
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
        """Make the memory. All ranks do this at the same time: their memory may be shared."""
        group = self._communicator
        flats = group.allocate(BucketSet.sizes(layout, group.world_size))
        placed = [flat.to(bucket.device) for flat, bucket in zip(flats, layout.buckets, strict=True)]
        return BucketSet(layout, placed, rank=group.rank, world_size=group.world_size)

    def _free_memory(self, plan: _Plan) -> BucketSet:
        """Return buckets that nobody sees any more: the shared ones, or others where somebody holds on to gradients."""
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
    """Take a gradient in the first pass of a layout: the order of gradients there is that of the next layout."""
    seen.pop(index, None)
    seen[index] = None
    exchange.put(index, gradient)
