"""TODO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch

from raydist.compat.torch_internals import buffer_table
from raydist.mirroring.aggregation import Aggregations, share_of
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.messages import overwrite

__all__ = ["BufferPlaces", "ReplicaBuffers"]


@final
class BufferPlaces:
    """The buffers of all modules of one replica.

    Args:
        table: The replica's objects.
    """

    def __init__(self, table: ReplicaTable) -> None:
        self._table = table
        self._places: dict[int, list[tuple[str, torch.Tensor]]] = {}

    def note(self, handle: int) -> None:
        """Driver and replica agree on the buffers that this object has now, if it is a module."""
        module = self._table.object_of(handle)
        if isinstance(module, torch.nn.Module):
            held = buffer_table(module)
            mirrored = [(name, tensor) for name, tensor in held.items() if self._table.handle_of(tensor) is not None]
            self._places[handle] = mirrored

    def forget(self, handle: int) -> None:
        """The driver has dropped an object."""
        self._places.pop(handle, None)

    def settle(self) -> None:
        """Give buffers that were replaced the values of what replaced them, and their places again."""
        for handle, places in self._places.items():
            held = buffer_table(self._table.object_of(handle))
            for name, tensor in places:
                now = held.get(name)
                if now is not tensor and isinstance(now, torch.Tensor) and self._is_new_value(tensor, now):
                    overwrite(tensor, now.detach())
                    held[name] = tensor

    def _is_new_value(self, tensor: torch.Tensor, now: torch.Tensor) -> bool:
        """Not so where another module keeps the old one, or where the new one is mirrored as well, or sparse."""
        if self._table.handle_of(now) is not None or {now.layout, tensor.layout} != {torch.strided}:
            return False
        uses = Counter(id(known) for places in self._places.values() for _, known in places)
        return uses[id(tensor)] == 1


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
