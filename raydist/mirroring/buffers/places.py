"""The modules and names under which mirrored buffers are registered, to find buffers that a step has replaced.

`self.mean = 0.9 * self.mean + ...` in a step leaves a tensor without a handle: the driver would read it from the first
replica only, and no other replica could take it over. The program means a new value, so the buffer gets that value.
"""

from __future__ import annotations

from collections import Counter
from typing import final

import torch

from raydist.compat.torch_internals import buffer_table
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.shipment import overwrite

__all__ = ["BufferPlaces"]


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
