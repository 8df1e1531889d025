"""Which objects a worker has, and by which handles driver and servers know them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch

from raydist.replicas.replica_view import VariablesView

__all__ = ["KnownObjects"]


@final
class KnownObjects:
    """All of one worker's, as they were when it was looked last."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._handles: dict[int, int] = {}
        self._looked_at = -1

    def look(self, variables: VariablesView) -> bool:
        """Follow what came and went; whether anything did."""
        if variables.changes == self._looked_at:
            return False
        self._looked_at = variables.changes
        self._objects = dict(variables.items())
        self._handles = {id(obj): handle for handle, obj in self._objects.items()}
        return True

    def __contains__(self, handle: int) -> bool:
        return handle in self._objects

    def get(self, handle: int) -> Any:
        """The object with a handle; None where it is gone."""
        return self._objects.get(handle)

    def objects(self) -> Iterable[Any]:
        """All of them."""
        return self._objects.values()

    def tensors(self) -> list[tuple[int, torch.Tensor]]:
        """Handles and tensors: parameters, buffers, weights of embedding tables."""
        return [(handle, obj) for handle, obj in self._objects.items() if isinstance(obj, torch.Tensor)]

    def handle_of(self, obj: Any) -> int | None:
        """The handle of an object; None where it has none."""
        return self._handles.get(id(obj))

    def membership(self, optimizer: torch.optim.Optimizer) -> tuple[tuple[int, ...], ...]:
        """Handles of the parameters of each of an optimizer's groups; 0 for one that is not known."""
        return tuple(self._handles_of(group["params"]) for group in optimizer.param_groups)

    def _handles_of(self, parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
        return tuple(self._handles.get(id(each), 0) for each in parameters)
