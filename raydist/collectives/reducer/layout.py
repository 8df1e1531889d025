"""Which gradients travel together: parameters laid out in buckets, the last ones of the model first.

Backward finishes the last layers first, so buckets filled in reverse order can travel while the rest is still computed.
A layout depends only on its arguments, so all ranks reach the same one by themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch

__all__ = ["Bucket", "BucketLayout", "ParameterSpec", "BucketSlot", "plan_buckets"]


@final
@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the layout must know of one parameter.

    Attributes:
        index: Its number in the reducer's list, the same on every rank.
        shape: Its shape.
        dtype: Dtype of its gradient.
        device: Where its gradient is.
        stride: How its elements lie in memory; None for row by row.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] | None = None

    @staticmethod
    def of(index: int, parameter: torch.Tensor) -> ParameterSpec:
        """The spec of a parameter: its gradient lies in memory as itself does, row by row if that has gaps."""
        dense = torch.empty_like(parameter, device="meta")
        stride = None if dense.is_contiguous() else dense.stride()
        return ParameterSpec(index, tuple(parameter.shape), parameter.dtype, parameter.device, stride)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@final
@dataclass(frozen=True, slots=True)
class BucketSlot:
    """A parameter's place in its bucket: elements `offset` .. `offset + spec.numel`."""

    spec: ParameterSpec
    offset: int


@final
@dataclass(frozen=True)
class Bucket:
    """Gradients that lie one behind the other in one flat tensor, which is all-reduced in one piece.

    Attributes:
        dtype: Of the gradients.
        device: Where they are.
        slots: The parameters.
        wire: The dtype in which they travel.
    """

    dtype: torch.dtype
    device: torch.device
    slots: tuple[BucketSlot, ...]
    wire: torch.dtype

    @cached_property
    def numel(self) -> int:
        """Gradient elements."""
        return sum(slot.spec.numel for slot in self.slots)

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """The parameters, by slot."""
        return tuple(slot.spec.index for slot in self.slots)


@final
@dataclass(frozen=True)
class BucketLayout:
    """All buckets, in the order in which they are sent."""

    buckets: tuple[Bucket, ...]

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Parameter index -> (bucket number, slot number)."""
        return {
            slot.spec.index: (number, position)
            for number, bucket in enumerate(self.buckets)
            for position, slot in enumerate(bucket.slots)
        }

    @cached_property
    def fingerprint(self) -> int:
        """A number below 2**63 that differs between different layouts; equal in all processes."""
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
        specs: In the order of the model, or the reverse of that in which their gradients appear.
        bucket_bytes: A bucket is closed before it would grow beyond this; a larger parameter has one for itself.
        first_bucket_bytes: The first bucket of each dtype is closed with the gradient that brings it to this: a small
            one starts the traffic early.
        compression: What float32 gradients travel as; all others, and all where it is None, travel as they are.

    >>> cpu = torch.device("cpu")
    >>> specs = [ParameterSpec(i, (4,), torch.float32, cpu) for i in range(3)]
    >>> [[slot.spec.index for slot in b.slots] for b in plan_buckets(specs, bucket_bytes=32).buckets]
    [[2, 1], [0]]
    """
    first_bytes = bucket_bytes if first_bucket_bytes is None else min(first_bucket_bytes, bucket_bytes)
    closed: list[list[ParameterSpec]] = []
    open_ones: dict[tuple[torch.dtype, torch.device], list[ParameterSpec]] = {}
    begun: set[tuple[torch.dtype, torch.device]] = set()  # of these the first bucket is closed
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
