"""Exchange of the bytes that each replica has read: broadcasts in windows of a size that is worth one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch

from raydist.collectives.flat_bytes import flat_bytes

__all__ = ["WINDOW_BYTES", "ByteExchange"]

WINDOW_BYTES = 16 << 20  # of one broadcast: large enough that its start-up cost is negligible, small on a device


@final
class ByteExchange:
    """One replica's end of the exchange. All replicas call it together.

    Args:
        rank: Rank of the replica.
        device: Device for the broadcasts.
        broadcast: Replaces a tensor by the tensor of the replica with this rank.
        window_bytes: Maximum size of one broadcast.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        broadcast: Callable[[torch.Tensor, int], None],
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._rank = rank
        self._device = device
        self._broadcast = broadcast
        self._window_bytes = window_bytes

    def share(self, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """Fill tensors with the values that other replicas have read.

        Args:
            parts: By rank, contiguous tensors on the CPU: values in this replica's entry, memory for values in all
                others. Shapes and dtypes are the same, in the same order, on all replicas.

        Blocking: until every replica calls it, at most the group's limit.
        """
        if len(parts) == 1:
            return
        for root, tensors in enumerate(parts):
            for window in _windows([flat_bytes(tensor) for tensor in tensors], self._window_bytes):
                self._share(window, root)

    def _share(self, window: Sequence[torch.Tensor], root: int) -> None:
        moved = torch.cat(list(window)).to(self._device)
        self._broadcast(moved, root)
        if root != self._rank:
            for target, found in zip(window, moved.cpu().split([len(each) for each in window]), strict=True):
                target.copy_(found)


def _windows(flats: Sequence[torch.Tensor], window_bytes: int) -> Iterator[list[torch.Tensor]]:
    window: list[torch.Tensor] = []
    room = window_bytes
    for flat in flats:
        while len(flat):
            window.append(flat[:room])
            flat = flat[room:]
            room -= len(window[-1])
            if not room:
                yield window
                window, room = [], window_bytes
    if window:
        yield window
