"""Gradient buckets: their layout, which ranks agree on, and their memory, which is reused from pass to pass.

Buckets are filled in the order in which gradients appear, so the first ones are reduced while the rest of the pass
still runs.

`.grad` holds views of a bucket's memory after a backward pass. The memory is written again only when no tensor refers
to it any more. A bucket with compression has a second buffer in the communication dtype: gradients are converted into
this buffer after weighting, and back after the reduction.

Collectives whose sizes differ between ranks do not raise: gloo ends the process, NCCL hangs. So ranks compare their
trained parameters on the host when the set of them changes, before a collective depends on it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import final

import torch

from raydist.collectives.base import Communicator, Work
from raydist.collectives.reducer.nonfinite import is_finite
from raydist.collectives.reducer.trailer import BACKWARD_ADVICE, Trailer, agree
from raydist.compat.torch_internals import StorageWeakRef, foreach_copy


@final
@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Description of one parameter for the bucket layout."""

    index: int  # number of the parameter in the reducer's list, the same on every rank
    shape: tuple[int, ...]  # shape of the parameter
    dtype: torch.dtype  # dtype of the gradient
    device: torch.device  # device of the gradient
    stride: tuple[int, ...] | None = None  # strides of the gradient in memory; None for a contiguous one

    @staticmethod
    def of(index: int, parameter: torch.Tensor) -> ParameterSpec:
        """Return the spec of a parameter. The gradient has the same strides, or contiguous ones if those have gaps."""
        dense = torch.empty_like(parameter, device="meta")
        stride = None if dense.is_contiguous() else dense.stride()
        return ParameterSpec(index, tuple(parameter.shape), parameter.dtype, parameter.device, stride)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@final
@dataclass(frozen=True)
class Bucket:
    """Gradients that share one flat tensor, which one all-reduce sums."""

    # the parameters, all of one dtype and device, in the order of their gradients in memory
    specs: tuple[ParameterSpec, ...]
    wire: torch.dtype  # dtype in which the gradients are communicated

    @property
    def dtype(self) -> torch.dtype:
        return self.specs[0].dtype

    @cached_property
    def numel(self) -> int:
        """Number of gradient elements in the bucket."""
        return sum(spec.numel for spec in self.specs)

    @cached_property
    def indices(self) -> tuple[int, ...]:
        return tuple(spec.index for spec in self.specs)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Position of each gradient in memory."""
        return tuple(accumulate((spec.numel for spec in self.specs[:-1]), initial=0))


def plan_buckets(
    specs: Sequence[ParameterSpec],
    *,
    bucket_bytes: int,
    first_bucket_bytes: int | None = None,
    compression: torch.dtype | None = None,
) -> tuple[Bucket, ...]:
    """Divide parameters into buckets, which are sent in this order. A bucket has one dtype and one device.

    Args:
        specs: The parameters in the order in which gradients appear.
        bucket_bytes: Maximum size of a bucket; a larger parameter has a bucket for itself.
        first_bucket_bytes: The first bucket of each dtype is closed by the gradient that brings it to this size. A
            small first bucket starts communication early.
        compression: Communication dtype of float32 gradients; None to keep float32. Other dtypes are never converted.

    >>> cpu = torch.device("cpu")
    >>> specs = [ParameterSpec(i, (4,), torch.float32, cpu) for i in range(3)]
    >>> [bucket.indices for bucket in plan_buckets(specs, bucket_bytes=32)]
    [(0, 1), (2,)]
    """
    first_bytes = bucket_bytes if first_bucket_bytes is None else min(first_bucket_bytes, bucket_bytes)
    closed: list[list[ParameterSpec]] = []
    open_ones: dict[tuple[torch.dtype, torch.device], list[ParameterSpec]] = {}
    begun: set[tuple[torch.dtype, torch.device]] = set()  # keys whose first bucket is closed
    for spec in specs:
        key = (spec.dtype, spec.device)
        group = open_ones.setdefault(key, [])
        if group and _num_bytes([*group, spec]) > bucket_bytes:
            closed.append(group)
            begun.add(key)
            group = open_ones[key] = []
        group.append(spec)
        if key not in begun and _num_bytes(group) >= first_bytes:
            closed.append(open_ones.pop(key))
            begun.add(key)
    closed.extend(open_ones.values())
    return tuple(Bucket(tuple(group), wire_dtype(group[0].dtype, compression)) for group in closed)


def wire_dtype(dtype: torch.dtype, compression: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which gradients of a dtype are communicated."""
    return compression if compression is not None and dtype is torch.float32 else dtype


def _num_bytes(specs: Iterable[ParameterSpec]) -> int:
    return sum(spec.numel * spec.dtype.itemsize for spec in specs)


# Up to this size one foreach copy and one multiplication take less time than one multiplication per gradient (10 us
# against 23 for 258 KB; for 2 MB, 75 against 57).
_SMALL_NUMEL = 1 << 17


def memory_of(bucket: Bucket, flat: torch.Tensor) -> BucketMemory:
    """Wrap a flat tensor as the memory of a bucket. The tensor may be longer than the gradients."""
    return LazyBucketMemory(bucket, flat) if flat.device.type == "xla" else BucketMemory(bucket, flat)


class BucketMemory:
    """The memory of one bucket."""

    def __init__(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.bucket = bucket  # layout of the bucket
        # the tensor that the all-reduce sums: the gradients and, in the last bucket, the trailer behind them
        self.flat = flat
        self._wire = flat[: bucket.numel]
        own = bucket.wire is not bucket.dtype
        self._body = torch.empty(bucket.numel, dtype=bucket.dtype, device=flat.device) if own else self._wire
        self._places = [_place(self._body, *each) for each in zip(bucket.specs, bucket.offsets, strict=True)]
        start = self._body.storage_offset()
        self._geometries = [(place.shape, place.stride(), place.storage_offset() - start) for place in self._places]
        self._handed_out: StorageWeakRef | None = None
        known = flat.device.type == "cpu" and bucket.dtype in (torch.float32, torch.float64, torch.float16)
        self._array = self._body.numpy() if known else None  # a new storage takes 2 us by numpy, 10 us by dlpack

    def fill(self, gradients: Sequence[torch.Tensor | None], scale: float) -> None:
        """Copy in dense gradients, multiplied by `scale`; None counts as zero."""
        places, given = self._places, [gradient for gradient in gradients if gradient is not None]
        if len(given) < len(places):
            self._body.zero_()
            places = [place for place, gradient in zip(places, gradients, strict=True) if gradient is not None]
        if self.bucket.numel > _SMALL_NUMEL and self.flat.device.type == "cpu":
            for place, gradient in zip(places, given, strict=True):
                torch.mul(gradient, scale, out=place)
        elif places:
            foreach_copy(places, given)
            if scale != 1.0:
                self._body.mul_(scale)

    def pack(self) -> None:
        """Convert the gradients to the communication dtype."""
        if self._wire is not self._body:
            self._wire.copy_(self._body)

    def unpack(self) -> None:
        """Convert the reduced gradients back to the dtype of the parameters."""
        if self._wire is not self._body:
            self._body.copy_(self._wire)

    def is_finite(self) -> bool:
        """Return True if the reduced gradients have neither NaN nor infinities. Blocks until the device is done."""
        return is_finite(self._body)

    def gradients(self) -> list[torch.Tensor]:
        # Each pass has a new storage object, which expires once no tensor refers to the gradients of that pass.
        array = self._array
        lent = torch.utils.dlpack.from_dlpack(self._body) if array is None else torch.from_numpy(array)
        self._handed_out = StorageWeakRef(lent.untyped_storage())
        # `.data`: autograd must not see views, since `zero_grad(set_to_none=False)` cannot detach a view in place.
        return [lent.as_strided(*geometry).data for geometry in self._geometries]

    def is_free(self) -> bool:
        """Return True if no tensor that `gradients` returned refers to the memory any more."""
        return self._handed_out is None or self._handed_out.expired()


@final
class LazyBucketMemory(BucketMemory):
    """The memory of one bucket on an XLA device. XLA tensors are lazy, so `gradients` returns copies."""

    def __init__(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.bucket = bucket
        self.flat = flat
        self._body = torch.zeros(bucket.numel, dtype=bucket.dtype, device=flat.device)

    def fill(self, gradients: Sequence[torch.Tensor | None], scale: float) -> None:
        parts = [
            self._body.new_zeros(spec.numel) if gradient is None else gradient.reshape(-1)
            for spec, gradient in zip(self.bucket.specs, gradients, strict=True)
        ]
        self._body = torch.cat(parts) * scale

    def pack(self) -> None:
        self.flat[: self.bucket.numel].copy_(self._body)

    def unpack(self) -> None:
        self._body = self.flat[: self.bucket.numel].to(self.bucket.dtype, copy=True)

    def gradients(self) -> list[torch.Tensor]:
        parts = self._body.split([spec.numel for spec in self.bucket.specs])
        return [part.clone().view(spec.shape) for part, spec in zip(parts, self.bucket.specs, strict=True)]

    def is_free(self) -> bool:
        return True


def _place(memory: torch.Tensor, spec: ParameterSpec, offset: int) -> torch.Tensor:
    if spec.stride is None:
        return memory[offset : offset + spec.numel].view(spec.shape)
    return memory.as_strided(spec.shape, spec.stride, memory.storage_offset() + offset)


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
