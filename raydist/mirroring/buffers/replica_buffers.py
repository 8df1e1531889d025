"""The buffers of one replica: what others take over from it, and what is its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch

from raydist.mirroring.buffers.aggregation import Aggregations
from raydist.mirroring.buffers.places import BufferPlaces
from raydist.mirroring.buffers.shares import share_of
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.shipment import overwrite

__all__ = ["ReplicaBuffers"]


@final
class ReplicaBuffers:
    """Every mirrored buffer of one replica.

    Args:
        table: The replica's objects.
        rank: The replica.
        world_size: All replicas.

    Attributes:
        places: Where the buffers are registered.
        aggregations: What their values on all replicas are together.
    """

    def __init__(self, table: ReplicaTable, rank: int, world_size: int) -> None:
        self._table = table
        self._rank = rank
        self._world_size = world_size
        self.places = BufferPlaces(table)
        self.aggregations = Aggregations()

    def forget(self, handle: int) -> None:
        """The driver has dropped an object."""
        self.places.forget(handle)
        self.aggregations.forget(handle)

    def items(self) -> list[tuple[int, torch.Tensor]]:
        """Handles and buffers, in an order that is the same on all replicas."""
        self.places.settle()
        tensors = [(handle, obj) for handle, obj in self._table.items() if isinstance(obj, torch.Tensor)]
        return [(handle, tensor) for handle, tensor in tensors if not isinstance(tensor, torch.nn.Parameter)]

    def copies(self) -> list[torch.Tensor]:
        """Their present values."""
        return [buffer.detach().clone() for _, buffer in self.items()]

    def take_over(self, values: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        """Take another replica's values, but those of before where the replicas' shares add up.

        Args:
            values: The `copies()` of another one.
            own: Those of this one, from before; none to take all.
        """
        for index, (handle, buffer) in enumerate(self.items()):
            keeps = own and self.aggregations.of(handle, buffer).is_divided
            overwrite(buffer, own[index] if keeps else values[index])

    def written(self) -> list[tuple[torch.Tensor, str]]:
        """The buffers that replicas agree on after each batch, and how; in an order that is the same on all."""
        written = self.aggregations.written()
        if not written:
            return []
        self.places.settle()
        return [(self._table.object_of(handle), how) for handle, how in written]

    def arrived(self, handles: Iterable[int]) -> None:
        """Keep this replica's share of values that the driver sent whole."""
        objects = [(handle, self._table.object_of(handle)) for handle in dict.fromkeys(handles)]
        if any(isinstance(obj, torch.nn.Module | torch.Tensor) for _, obj in objects):
            self.look()
        tensors = [(handle, obj) for handle, obj in objects if isinstance(obj, torch.Tensor)]
        for handle, tensor in tensors:
            if self.aggregations.of(handle, tensor).is_divided:
                overwrite(tensor, share_of(tensor, self._rank, self._world_size))

    def look(self) -> None:
        """The modules may say something else now."""
        self.aggregations.update(self._table.items(), self._table.handle_of)

    def own_values(self) -> dict[int, torch.Tensor]:
        """Copies of what each replica gathers from its own rows."""
        gathered = [(handle, obj) for handle, obj in self.items() if self.aggregations.of(handle, obj).is_gathered]
        return {handle: obj.detach().clone() for handle, obj in gathered}

    def restore_own(self, handle: int, values: Mapping[int, Any]) -> None:
        """Give a buffer what it had in `own_values`.

        A replica that is new has nothing of what the shares of the others add up to.
        """
        tensor = self._table.object_of(handle)
        if handle in values:
            overwrite(tensor, values[handle])
        elif self.aggregations.of(handle, tensor).is_divided:
            overwrite(tensor, torch.zeros_like(tensor))
