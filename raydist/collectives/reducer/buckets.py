"""The buckets of one rank: the layout agreed between ranks, and bucket memory that is reused from pass to pass.

Collectives whose sizes differ between ranks do not raise: gloo ends the process, NCCL hangs. So ranks compare their
trained parameters on the host when the set of them changes, before a collective depends on it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import final

import torch

from raydist.collectives.base import Communicator, Work
from raydist.collectives.reducer.bucket import Bucket, BucketMemory, ParameterSpec, memory_of, plan_buckets
from raydist.collectives.reducer.trailer import BACKWARD_ADVICE, Trailer, agree

Trained = tuple[tuple[int, torch.dtype, torch.Size], ...]
"""Number, dtype and shape of each trained parameter."""

_MOST_KEPT = 2  # plans: programs that toggle requires_grad between two models use two in turns


@final
class BucketSet:
    """The memory of all buckets of a layout, with the trailer at the end of the last bucket.

    Args:
        layout: The buckets, in the order in which they are sent.
        flats: One flat tensor for each bucket, of `sizes(...)` elements.
    """

    def __init__(self, layout: Sequence[Bucket], communicator: Communicator, flats: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self.buckets: tuple[BucketMemory, ...] = tuple(map(memory_of, layout, flats))
        # number of a parameter -> number of the parameter's bucket, in the order of the layout
        self.numbers = {index: number for number, bucket in enumerate(layout) for index in bucket.indices}
        self.trailer: Trailer | None = None
        if layout:
            memory = flats[-1][layout[-1].numel :]
            self.trailer = Trailer(memory, len(self.numbers), communicator.rank, communicator.world_size)

    @staticmethod
    def sizes(layout: Sequence[Bucket], world_size: int) -> list[tuple[int, torch.dtype]]:
        """Return the number of elements and the dtype of each flat tensor."""
        numels = [bucket.numel for bucket in layout]
        if numels:
            numels[-1] += Trailer.size(sum(len(bucket.specs) for bucket in layout), world_size)
        return [(numel, bucket.wire) for numel, bucket in zip(numels, layout, strict=True)]

    def is_free(self) -> bool:
        """Return True if no gradient refers to the memory any more."""
        return all(bucket.is_free() for bucket in self.buckets)


@final
class BucketPlan:
    """The buckets of one set of trained parameters.

    The first pass sends nothing before its end. Then `settle` lays out the buckets in the order in which gradients
    have appeared, without those that are sparse on any rank: their rows are exchanged.

    Args:
        sparse: Parameters whose gradients will be sparse.
    """

    def __init__(
        self,
        communicator: Communicator,
        specs: Mapping[int, ParameterSpec],
        sparse: Collection[int],
        lay_out: Callable[[Sequence[ParameterSpec]], Sequence[Bucket]],
    ) -> None:
        self.row_specs: list[ParameterSpec] = []  # the parameters with sparse gradients
        self._communicator = communicator
        self._specs = specs
        self._sparse = sparse
        self._lay_out = lay_out
        self._memory: BucketSet | None = None
        self._spare: BucketSet | None = None

    @functools.cached_property
    def fingerprint(self) -> int:
        """Hash of the parameters, below 2**63, the same in all processes."""
        kinds = [(spec.index, spec.shape, str(spec.dtype), spec.stride) for spec in self._specs.values()]
        return int.from_bytes(hashlib.blake2b(repr(kinds).encode(), digest_size=8).digest()) >> 1

    def settle(self, seen: Sequence[int], sparse: Collection[int]) -> BucketSet:
        """Lay out the buckets at the end of the first pass, and return their memory. Blocks until all ranks call it.

        Args:
            seen: Parameters in the order in which this rank had their gradients. The order of rank 0 counts; parameters
                without a gradient there come last.
            sparse: Parameters with a sparse gradient on this rank.
        """
        group = self._communicator
        order, rows = list(seen), set(self._sparse)
        if self._specs:
            mine = json.dumps([order if group.rank == 0 else [], list(sparse)])
            said = [json.loads(each) for each in group.exchange_on_host(mine.encode(), "the order of gradients")]
            order = said[0][0]
            rows.update(index for _, theirs in said for index in theirs)
        order += sorted(self._specs.keys() - set(order), reverse=True)
        self.row_specs = [self._specs[index] for index in sorted(rows)]
        layout = self._lay_out([self._specs[index] for index in order if index not in rows])
        flats = group.allocate(BucketSet.sizes(layout, group.world_size))
        placed = [flat.to(bucket.specs[0].device) for flat, bucket in zip(flats, layout, strict=True)]
        self._memory = BucketSet(layout, group, placed)
        return self._memory

    def free_memory(self) -> BucketSet | None:
        """Return bucket memory that no gradient of an earlier pass refers to; None before `settle`."""
        memory, spare = self._memory, self._spare
        if memory is None or memory.is_free():
            return memory
        if spare is None or not spare.is_free():
            flats = [torch.empty_like(bucket.flat) for bucket in memory.buckets]
            spare = self._spare = BucketSet(memory.layout, self._communicator, flats)
        return spare


@final
class Buckets:
    """The bucket plans of one rank. See `plan_buckets` and `GradientReducer` for the arguments."""

    def __init__(
        self,
        communicator: Communicator,
        *,
        bucket_bytes: int,
        first_bucket_bytes: int,
        compression: torch.dtype | None = None,
        expect_rows: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.compression = compression
        self.works: list[Work] = []  # all-reduces that have been started in the last pass and are not waited for yet
        self._communicator = communicator
        self._lay_out = functools.partial(
            plan_buckets, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes, compression=compression
        )
        self._expect_rows = expect_rows
        self._trained: Trained | None = None
        self._plans: dict[Trained, BucketPlan] = {}

    def begin_pass(
        self, trained: Trained, parameters: Mapping[int, torch.nn.Parameter], step: int, backward: int
    ) -> BucketPlan:
        """Return the plan for backward pass number `backward` of a step, given all parameters by number.

        Blocking: after a change of the trained parameters, until all ranks have begun the pass.

        Raises:
            CollectiveMismatchError: Ranks train different parameters.
        """
        for work in self.works:  # the previous pass ended with an error, and its buckets must not be written any more
            work.wait()
        self.works.clear()
        if trained == self._trained:
            return self._plans[trained]
        plan = self._plans.pop(trained, None) or self._new_plan(trained, parameters)
        numbers = {
            "step": step,
            "backward pass": backward,
            "trained parameters": len(trained),
            "layout of trained parameters": plan.fingerprint,
        }
        agree(self._communicator, "the backward pass", numbers, BACKWARD_ADVICE)
        self._plans[trained] = plan
        if len(self._plans) > _MOST_KEPT:
            del self._plans[next(iter(self._plans))]
        self._trained = trained
        return plan

    def _new_plan(self, trained: Trained, parameters: Mapping[int, torch.nn.Parameter]) -> BucketPlan:
        specs = {index: ParameterSpec.of(index, parameters[index]) for index, _, _ in trained}
        on_xla = self._communicator.device.type == "xla"  # which has no sparse tensors
        expected = () if on_xla else self._expect_rows()
        sparse = [index for index in specs if id(parameters[index]) in expected]
        return BucketPlan(self._communicator, specs, sparse, self._lay_out)
