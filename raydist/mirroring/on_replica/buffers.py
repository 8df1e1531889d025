"""The mirrored buffers of one replica: values that other replicas take over, and values of its own.

A step may replace a buffer: `self.mean = 0.9 * self.mean + ...` leaves a tensor without a handle, which no other
replica could take over. The program means a new value, so the mirrored buffer gets that value and its place again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch

from raydist.compat.torch_internals import buffer_table
from raydist.mirroring.aggregation import Aggregations, share_of
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.messages import overwrite

__all__ = ["ReplicaBuffers"]


@final
class ReplicaBuffers:
    """The mirrored buffers of one replica.

    Args:
        table: The replica's objects.
        rank: Rank of the replica.
        world_size: Number of replicas.

    Attributes:
        aggregations: The rules that combine the values of all replicas.
    """

    def __init__(self, table: ReplicaTable, rank: int, world_size: int) -> None:
        self._table = table
        self._rank = rank
        self._world_size = world_size
        self._places: dict[int, list[tuple[str, torch.Tensor]]] = {}  # names and buffers, by the module's handle
        self.aggregations = Aggregations()

    def note_places(self, handle: int) -> None:
        """Record the buffers that this object has, if it is a module, because driver and replica agree on them now."""
        module = self._table.object_of(handle)
        if isinstance(module, torch.nn.Module):
            held = buffer_table(module)
            mirrored = [(name, tensor) for name, tensor in held.items() if self._table.handle_of(tensor) is not None]
            self._places[handle] = mirrored

    def settle(self) -> None:
        """Give buffers that a step replaced the new values, and register them in their modules again."""
        for handle, places in self._places.items():
            held = buffer_table(self._table.object_of(handle))
            for name, tensor in places:
                now = held.get(name)
                if now is not tensor and isinstance(now, torch.Tensor) and self._is_new_value(tensor, now):
                    overwrite(tensor, now.detach())
                    held[name] = tensor

    def _is_new_value(self, tensor: torch.Tensor, now: torch.Tensor) -> bool:
        """Return False if another module keeps the old tensor, or if the new one is mirrored as well, or sparse."""
        if self._table.handle_of(now) is not None or {now.layout, tensor.layout} != {torch.strided}:
            return False
        uses = Counter(id(known) for places in self._places.values() for _, known in places)
        return uses[id(tensor)] == 1

    def forget(self, handle: int) -> None:
        """Drop the records of an object that the driver has dropped."""
        self._places.pop(handle, None)
        self.aggregations.forget(handle)

    def items(self) -> list[tuple[int, torch.Tensor]]:
        """Return handles and buffers, in an order that is the same on all replicas."""
        self.settle()
        tensors = [(handle, obj) for handle, obj in self._table.items() if isinstance(obj, torch.Tensor)]
        return [(handle, tensor) for handle, tensor in tensors if not isinstance(tensor, torch.nn.Parameter)]

    def take_over(self, values: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        """Set the buffers to another replica's values, except where the shares of replicas add up.

        Args:
            values: Values of `items()` on the other replica.
            own: Earlier values of `items()` on this replica, to set where shares add up; empty to take all of `values`.
        """
        for index, (handle, buffer) in enumerate(self.items()):
            keeps = own and self.aggregations.of(handle, buffer).is_divided
            overwrite(buffer, own[index] if keeps else values[index])

    def written(self) -> list[tuple[torch.Tensor, str]]:
        """Return the buffers that replicas agree on after each batch, each with the rule; in the order of `items`."""
        written = self.aggregations.written()
        if not written:
            return []
        self.settle()
        return [(self._table.object_of(handle), how) for handle, how in written]

    def arrived(self, handles: Iterable[int]) -> None:
        """Keep this replica's share of the values that the driver sent whole."""
        objects = [(handle, self._table.object_of(handle)) for handle in dict.fromkeys(handles)]
        if any(isinstance(obj, torch.nn.Module | torch.Tensor) for _, obj in objects):
            self.update_aggregations()
        for handle, obj in objects:
            if isinstance(obj, torch.Tensor) and self.aggregations.of(handle, obj).is_divided:
                overwrite(obj, share_of(obj, self._rank, self._world_size))

    def update_aggregations(self) -> None:
        """Read the aggregations from the modules again."""
        self.aggregations.update(self._table.items(), self._table.handle_of)

    def own_values(self) -> dict[int, torch.Tensor]:
        """Return copies of the buffers that each replica computes from its own rows."""
        gathered = [(handle, obj) for handle, obj in self.items() if self.aggregations.of(handle, obj).is_gathered]
        return {handle: obj.detach().clone() for handle, obj in gathered}

    def restore_own(self, handle: int, values: Mapping[int, Any]) -> None:
        """Set a buffer to its value in `own_values`; a new replica has no share yet of values that add up."""
        tensor = self._table.object_of(handle)
        if handle in values:
            overwrite(tensor, values[handle])
        elif self.aggregations.of(handle, tensor).is_divided:
            overwrite(tensor, torch.zeros_like(tensor))
