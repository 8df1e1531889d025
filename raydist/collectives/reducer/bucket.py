"""Gradient buckets: the layout of parameters in buckets, and the memory of one bucket.

The backward pass finishes the last layers first, so buckets filled in reverse order are reduced while the rest of the
pass still runs. A layout depends only on its arguments, so all ranks compute the same one.

`.grad` holds views of a bucket's memory after a backward pass. The memory is written again only when no tensor refers
to it any more. A bucket with compression has a second buffer in the communication dtype: gradients are converted into
this buffer after weighting, and back after the reduction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, final

import torch

from raydist.collectives.reducer.nonfinite import is_finite
from raydist.compat.torch_internals import StorageWeakRef, foreach_copy

__all__ = [
    "Bucket",
    "BucketLayout",
    "BucketMemory",
    "LazyBucketMemory",
    "ParameterSpec",
    "PlainBucketMemory",
    "memory_of",
    "plan_buckets",
]


@final
@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Description of one parameter for the bucket layout.

    Attributes:
        index: Number of the parameter in the reducer's list, the same on every rank.
        shape: Shape of the parameter.
        dtype: Dtype of the gradient.
        device: Device of the gradient.
        stride: Strides of the gradient in memory; None for a contiguous one.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] | None = None

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
@dataclass(frozen=True, slots=True)
class BucketSlot:
    """Position of a parameter in its bucket: elements `offset` .. `offset + spec.numel`."""

    spec: ParameterSpec
    offset: int


@final
@dataclass(frozen=True)
class Bucket:
    """Gradients that share one flat tensor, which one all-reduce sums.

    Attributes:
        dtype: Dtype of the gradients.
        device: Device of the gradients.
        slots: The parameters and their offsets.
        wire: Dtype in which the gradients are communicated.
    """

    dtype: torch.dtype
    device: torch.device
    slots: tuple[BucketSlot, ...]
    wire: torch.dtype

    @cached_property
    def numel(self) -> int:
        """Number of gradient elements in the bucket."""
        return sum(slot.spec.numel for slot in self.slots)

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """Numbers of the parameters, by slot."""
        return tuple(slot.spec.index for slot in self.slots)


@final
@dataclass(frozen=True)
class BucketLayout:
    """All buckets, in the order in which they are sent."""

    buckets: tuple[Bucket, ...]

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Map parameter index -> (bucket number, slot number)."""
        return {
            slot.spec.index: (number, position)
            for number, bucket in enumerate(self.buckets)
            for position, slot in enumerate(bucket.slots)
        }

    @cached_property
    def fingerprint(self) -> int:
        """Hash of the layout, below 2**63, the same in all processes."""
        text = repr([(str(b.dtype), str(b.wire), [_layout_of(s.spec) for s in b.slots]) for b in self.buckets])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def plan_buckets(
    specs: Sequence[ParameterSpec],
    *,
    bucket_bytes: int,
    first_bucket_bytes: int | None = None,
    compression: torch.dtype | None = None,
) -> BucketLayout:
    """Lay out parameters in reverse order, one dtype and device per bucket.

    Args:
        specs: The parameters in the order of the model, or in the reverse of the order in which gradients appear.
        bucket_bytes: Maximum size of a bucket; a larger parameter has a bucket for itself.
        first_bucket_bytes: The first bucket of each dtype is closed by the gradient that brings it to this size. A
            small first bucket starts communication early.
        compression: Communication dtype of float32 gradients; None to keep float32. Other dtypes are never converted.

    >>> cpu = torch.device("cpu")
    >>> specs = [ParameterSpec(i, (4,), torch.float32, cpu) for i in range(3)]
    >>> [[slot.spec.index for slot in b.slots] for b in plan_buckets(specs, bucket_bytes=32).buckets]
    [[2, 1], [0]]
    """
    first_bytes = bucket_bytes if first_bucket_bytes is None else min(first_bucket_bytes, bucket_bytes)
    closed: list[list[ParameterSpec]] = []
    open_ones: dict[tuple[torch.dtype, torch.device], list[ParameterSpec]] = {}
    begun: set[tuple[torch.dtype, torch.device]] = set()  # keys whose first bucket is closed
    for spec in reversed(specs):
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
    return BucketLayout(tuple(_bucket(group, compression) for group in closed))


def _layout_of(spec: ParameterSpec) -> tuple[object, ...]:
    return (spec.index, spec.shape) if spec.stride is None else (spec.index, spec.shape, spec.stride)


def _num_bytes(specs: Iterable[ParameterSpec]) -> int:
    return sum(spec.numel * spec.dtype.itemsize for spec in specs)


def _bucket(specs: Sequence[ParameterSpec], compression: torch.dtype | None) -> Bucket:
    slots = []
    offset = 0
    for spec in specs:
        slots.append(BucketSlot(spec, offset))
        offset += spec.numel
    dtype = specs[0].dtype
    wire = compression if compression is not None and dtype is torch.float32 else dtype
    return Bucket(dtype, specs[0].device, tuple(slots), wire)


# Up to this size one foreach copy and one multiplication take less time than one multiplication per gradient (10 us
# against 23 for 258 KB; for 2 MB, 75 against 57).
_SMALL_NUMEL = 1 << 17


class BucketMemory(Protocol):
    """The memory of one bucket.

    Attributes:
        bucket: Layout of the bucket.
        flat: The tensor that the all-reduce sums: the gradients and, in the last bucket, the trailer behind them.
    """

    bucket: Bucket
    flat: torch.Tensor

    def fill(self, gradients: list[torch.Tensor], scale: float) -> None:
        """Copy in a dense gradient for every slot, multiplied by `scale`."""

    def fill_some(self, gradients: Sequence[torch.Tensor | None], scale: float) -> None:
        """Copy in gradients, some of which may be sparse or None; None counts as zero."""

    def add(self, position: int, gradient: torch.Tensor) -> None:
        """Add to the gradient of one slot."""

    def pack(self) -> None:
        """Convert the gradients to the communication dtype."""

    def unpack(self) -> None:
        """Convert the reduced gradients back to the dtype of the parameters."""

    def is_finite(self) -> bool:
        """Return True if the reduced gradients have neither NaN nor infinities. Blocks until the device is done."""

    def gradients(self) -> Sequence[torch.Tensor]:
        """Return the reduced gradients, by slot."""

    def is_free(self) -> bool:
        """Return True if no tensor that `gradients` returned refers to the memory any more."""


def memory_of(bucket: Bucket, flat: torch.Tensor) -> BucketMemory:
    """Wrap a flat tensor as the memory of a bucket. The tensor may be longer than the gradients."""
    return LazyBucketMemory(bucket, flat) if flat.device.type == "xla" else PlainBucketMemory(bucket, flat)


@final
class PlainBucketMemory(BucketMemory):
    """The memory of one bucket on a CPU or a GPU."""

    def __init__(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.bucket = bucket
        self.flat = flat
        self._wire = flat[: bucket.numel]
        own = bucket.wire is not bucket.dtype
        self._body = torch.empty(bucket.numel, dtype=bucket.dtype, device=flat.device) if own else self._wire
        self._places = [_place(self._body, slot.spec, slot.offset) for slot in bucket.slots]
        start = self._body.storage_offset()
        self._geometries = [(place.shape, place.stride(), place.storage_offset() - start) for place in self._places]
        self._handed_out: StorageWeakRef | None = None
        known = flat.device.type == "cpu" and bucket.dtype in (torch.float32, torch.float64, torch.float16)
        self._array = self._body.numpy() if known else None  # a new storage takes 2 us by numpy, 10 us by dlpack

    def fill(self, gradients: list[torch.Tensor], scale: float) -> None:
        if self.bucket.numel <= _SMALL_NUMEL or self.flat.device.type != "cpu":
            foreach_copy(self._places, gradients)
            if scale != 1.0:
                self._body.mul_(scale)
            return
        for place, gradient in zip(self._places, gradients, strict=True):
            torch.mul(gradient, scale, out=place)

    def fill_some(self, gradients: Sequence[torch.Tensor | None], scale: float) -> None:
        for place, gradient in zip(self._places, gradients, strict=True):
            if gradient is None:
                place.zero_()
            else:
                torch.mul(_dense(gradient), scale, out=place)

    def add(self, position: int, gradient: torch.Tensor) -> None:
        self._places[position].add_(_dense(gradient))

    def pack(self) -> None:
        if self._wire is not self._body:
            self._wire.copy_(self._body)

    def unpack(self) -> None:
        if self._wire is not self._body:
            self._body.copy_(self._wire)

    def is_finite(self) -> bool:
        return is_finite(self._body)

    def gradients(self) -> Sequence[torch.Tensor]:
        # Each pass has a new storage object, which expires once no tensor refers to the gradients of that pass.
        array = self._array
        lent = torch.utils.dlpack.from_dlpack(self._body) if array is None else torch.from_numpy(array)
        self._handed_out = StorageWeakRef(lent.untyped_storage())
        # `.data`: autograd must not see views, since `zero_grad(set_to_none=False)` cannot detach a view in place.
        return [lent.as_strided(*geometry).data for geometry in self._geometries]

    def is_free(self) -> bool:
        return self._handed_out is None or self._handed_out.expired()


@final
class LazyBucketMemory(BucketMemory):
    """The memory of one bucket on an XLA device. XLA tensors are lazy, so `gradients` returns copies."""

    def __init__(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.bucket = bucket
        self.flat = flat
        self._body = torch.zeros(bucket.numel, dtype=bucket.dtype, device=flat.device)

    def fill(self, gradients: Sequence[torch.Tensor], scale: float) -> None:
        self.fill_some(gradients, scale)

    def fill_some(self, gradients: Sequence[torch.Tensor | None], scale: float) -> None:
        parts = [
            self._body.new_zeros(slot.spec.numel) if gradient is None else _dense(gradient).reshape(-1)
            for slot, gradient in zip(self.bucket.slots, gradients, strict=True)
        ]
        if parts:
            self._body = torch.cat(parts) * scale

    def add(self, position: int, gradient: torch.Tensor) -> None:
        slot = self.bucket.slots[position]
        self._body[slot.offset : slot.offset + slot.spec.numel].add_(_dense(gradient).reshape(-1))

    def pack(self) -> None:
        self.flat[: self.bucket.numel].copy_(self._body)

    def unpack(self) -> None:
        self._body = self.flat[: self.bucket.numel].to(self.bucket.dtype, copy=True)

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self._body).all())

    def gradients(self) -> Sequence[torch.Tensor]:
        slots = self.bucket.slots
        return [self._body[slot.offset : slot.offset + slot.spec.numel].clone().view(slot.spec.shape) for slot in slots]

    def is_free(self) -> bool:
        return True


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _place(memory: torch.Tensor, spec: ParameterSpec, offset: int) -> torch.Tensor:
    if spec.stride is None:
        return memory[offset : offset + spec.numel].view(spec.shape)
    return memory.as_strided(spec.shape, spec.stride, memory.storage_offset() + offset)
