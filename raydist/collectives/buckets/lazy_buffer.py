"""The memory of one bucket on a device whose tensors are values to come: nobody can see who shares memory with whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch

from raydist.collectives.buckets.layout import Bucket
from raydist.collectives.buckets.tail import BucketTail

__all__ = ["LazyBuffer"]


@final
class LazyBuffer:
    """What `BucketBuffer` is elsewhere. What is lent are copies: XLA makes them where it needs them.

    Args:
        bucket: What lies in it.
        flat: `BucketBuffer.numel(bucket, world_size)` elements of `bucket.wire`: what travels.
        rank: This rank, for what it adds behind the gradients.
        world_size: All ranks.
    """

    num_lent = 0

    def __init__(self, bucket: Bucket, flat: torch.Tensor, *, rank: int, world_size: int) -> None:
        self.bucket = bucket
        self.flat = flat
        self.tail = BucketTail(flat[bucket.numel :], len(bucket.slots), rank=rank, world_size=world_size)
        self._body = torch.zeros(bucket.numel, dtype=bucket.dtype, device=flat.device)

    def fill(self, gradients: Sequence[torch.Tensor], scale: float) -> None:
        """Copy in a dense gradient for every slot, times `scale`."""
        self.fill_some(gradients, scale)

    def fill_some(self, gradients: Sequence[torch.Tensor | None], scale: float) -> None:
        """The same where some are missing, which then count as zero, or are sparse."""
        parts = [
            self._body.new_zeros(slot.spec.numel) if gradient is None else _dense(gradient).reshape(-1)
            for slot, gradient in zip(self.bucket.slots, gradients, strict=True)
        ]
        if parts:
            self._body = torch.cat(parts) * scale

    def add(self, position: int, gradient: torch.Tensor) -> None:
        """Add to what is there of one slot."""
        slot = self.bucket.slots[position]
        self._body[slot.offset : slot.offset + slot.spec.numel].add_(_dense(gradient).reshape(-1))

    def pack(self) -> None:
        """All is in: make it fit to travel."""
        self.flat[: self.bucket.numel].copy_(self._body)

    def unpack(self) -> None:
        """It was reduced: make it what it was before."""
        self._body = self.flat[: self.bucket.numel].to(self.bucket.dtype, copy=True)

    def is_finite(self) -> bool:
        """Whether what was reduced has neither NaNs nor infinities."""
        return bool(torch.isfinite(self._body).all())

    def lend(self) -> Sequence[torch.Tensor]:
        """The reduced gradients, by slot."""
        slots = self.bucket.slots
        return [self._body[slot.offset : slot.offset + slot.spec.numel].clone().view(slot.spec.shape) for slot in slots]

    def take_back(self, gradients: Iterable[torch.Tensor]) -> None:
        """Nothing: none of these is memory of this bucket."""


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
