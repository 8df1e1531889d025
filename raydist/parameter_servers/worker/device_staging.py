"""Transfers between a worker's GPU and servers: through pinned memory, beside the computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

import torch

__all__ = ["CudaSideStream", "HostGradients", "SideStream", "side_stream_for"]


class SideStream(Protocol):
    """The interface of a device's copy stream."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start to copy to the first of each pair from the second, which is pinned. Does not block.

        The copies run after all work that the device has now, and before all work that it gets later.
        """

    def wait(self) -> None:
        """Block until the copies have read their sources."""

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy to the first of each pair, which is pinned, from the second; blocks."""

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Return pinned memory on the host for the values of a tensor."""


@final
class CudaSideStream:
    """The copy stream of a CUDA device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start to copy to the device."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side), torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                target.record_stream(self._side)
        current.wait_stream(self._side)

    def wait(self) -> None:
        """Block until the copies have read their sources."""
        self._side.synchronize()

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy to the host; blocks."""
        current = torch.cuda.current_stream(self._device)
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        current.synchronize()

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Return pinned memory like a tensor."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def side_stream_for(device: torch.device) -> SideStream:
    """Return a copy stream for a device of this process."""
    return CudaSideStream(device)


@final
class HostGradients:
    """Copies gradients to the host, into reused pinned memory.

    Args:
        side: The device's copy stream; None: made for the first gradient on a device.
    """

    def __init__(self, side: SideStream | None = None) -> None:
        self._side = side
        self._pinned: dict[tuple[int, torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    def bring(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients on the host; gradients there already are not copied. Valid until the next call."""
        away = [(place, each) for place, each in enumerate(gradients) if not each.is_cpu]
        if not away:
            return list(gradients)
        if self._side is None:
            self._side = side_stream_for(away[0][1].device)
        found = list(gradients)
        pairs = []
        for place, each in away:
            found[place] = self._memory(place, each)
            pairs.append((found[place], each))
        self._side.fetch(pairs)
        return found

    def _memory(self, place: int, like: torch.Tensor) -> torch.Tensor:
        key = place, like.dtype, tuple(like.shape)
        if key not in self._pinned and self._side is not None:
            for known in [other for other in self._pinned if other[0] == place]:
                del self._pinned[known]
            self._pinned[key] = self._side.pinned(like)
        return self._pinned[key]
