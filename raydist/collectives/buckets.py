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
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

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
    """One flat tensor that is all-reduced in one piece.

    After the gradients come two flags per slot, added up over ranks like everything else: how many ranks have a
    gradient for it, and how many a sparse one; and one flag for gradients that came too late for their bucket.
    """

    dtype: torch.dtype
    device: torch.device
    slots: tuple[BucketSlot, ...]

    @cached_property
    def numel(self) -> int:
        """Gradient elements."""
        return sum(slot.spec.numel for slot in self.slots)

    @property
    def size(self) -> int:
        """Elements of the flat tensor, flags included."""
        return self.numel + 2 * len(self.slots) + 1


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
        text = repr([(str(b.dtype), [(s.spec.index, s.spec.shape) for s in b.slots]) for b in self.buckets])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def plan_buckets(
    specs: Sequence[ParameterSpec], *, bucket_bytes: int, first_bucket_bytes: int | None = None
) -> BucketLayout:
    """Lay out parameters in reverse order, one dtype and device per bucket.

    Args:
        specs: In the order of the model.
        bucket_bytes: A bucket is closed before it would grow beyond this; a larger parameter has one for itself.
        first_bucket_bytes: The same for the first bucket of each dtype: a small one starts the traffic early.

    >>> cpu = torch.device("cpu")
    >>> specs = [ParameterSpec(i, (4,), torch.float32, cpu) for i in range(3)]
    >>> [[slot.spec.index for slot in b.slots] for b in plan_buckets(specs, bucket_bytes=32).buckets]
    [[2, 1], [0]]
    """
    first_bytes = bucket_bytes if first_bucket_bytes is None else min(first_bucket_bytes, bucket_bytes)
    closed: list[list[ParameterSpec]] = []
    open_ones: dict[tuple[torch.dtype, torch.device], list[ParameterSpec]] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    for spec in reversed(specs):
        key = (spec.dtype, spec.device)
        group = open_ones.setdefault(key, [])
        if group and _num_bytes([*group, spec]) > limits.get(key, first_bytes):
            closed.append(group)
            limits[key] = bucket_bytes
            group = open_ones[key] = []
        group.append(spec)
    closed.extend(open_ones.values())
    return BucketLayout(tuple(_bucket(group) for group in closed))


def _num_bytes(specs: Iterable[ParameterSpec]) -> int:
    return sum(spec.numel * spec.dtype.itemsize for spec in specs)


def _bucket(specs: Sequence[ParameterSpec]) -> Bucket:
    slots = []
    offset = 0
    for spec in specs:
        slots.append(BucketSlot(spec, offset))
        offset += spec.numel
    return Bucket(specs[0].dtype, specs[0].device, tuple(slots))
