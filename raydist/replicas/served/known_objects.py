"""The objects of a worker, and the handles by which the driver and the servers know them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch

from raydist.replicas.rules import VariablesView

__all__ = ["KnownObjects"]


@final
class KnownObjects:
    """A snapshot of one worker's objects, refreshed by `look`."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._handles: dict[int, int] = {}
        self._looked_at = -1

    def look(self, variables: VariablesView) -> bool:
        """Refresh the snapshot; return True if objects were added or removed."""
        if variables.changes == self._looked_at:
            return False
        self._looked_at = variables.changes
        self._objects = dict(variables.items())
        self._handles = {id(obj): handle for handle, obj in self._objects.items()}
        return True

    def __contains__(self, handle: int) -> bool:
        return handle in self._objects

    def get(self, handle: int) -> Any:
        """Return the object with a handle, or None if it is gone."""
        return self._objects.get(handle)

    def objects(self) -> Iterable[Any]:
        """Return all objects."""
        return self._objects.values()

    def tensors(self) -> list[tuple[int, torch.Tensor]]:
        """Return handles and tensors: parameters, buffers, weights of embedding tables."""
        return [(handle, obj) for handle, obj in self._objects.items() if isinstance(obj, torch.Tensor)]

    def handle_of(self, obj: Any) -> int | None:
        """Return the handle of an object, or None if it has none."""
        return self._handles.get(id(obj))

    def membership(self, optimizer: torch.optim.Optimizer) -> tuple[tuple[int, ...], ...]:
        """Return the handles of the parameters of each of an optimizer's groups; 0 for an unknown parameter."""
        return tuple(self._handles_of(group["params"]) for group in optimizer.param_groups)

    def _handles_of(self, parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
        return tuple(self._handles.get(id(each), 0) for each in parameters)
