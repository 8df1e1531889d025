"""A closure of an optimizer that returns the loss over all replicas' rows: line searches then decide alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

__all__ = ["GlobalClosure"]


@final
class GlobalClosure:
    """The closure that an optimizer gets in place of the program's.

    Args:
        closure: The program's.
        make_global: Makes the gradients global that the closure leaves behind.
        reduce: The loss of all replicas, of this one's; both are detached.
    """

    def __init__(
        self,
        closure: Callable[[], Any],
        make_global: Callable[[], None],
        reduce: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._closure = closure
        self._make_global = make_global
        self._reduce = reduce
        self._values: list[tuple[Any, Any]] = []

    def __call__(self) -> Any:
        """Call the program's closure; a number or floating tensor that it returns becomes global."""
        own: Any = self._closure()
        value: Any
        self._make_global()
        if isinstance(own, torch.Tensor) and own.is_floating_point():
            value = _replaced(own, self._reduce(own.detach()))
        elif isinstance(own, float):
            value = self._reduce(torch.tensor(own, dtype=torch.float64)).item()
        else:
            return own
        self._values.append((value, own))
        return value

    def own_value(self, returned: Any) -> Any:
        """What `optimizer.step` returns to the program: of a closure's value this replica's own, as of all losses."""
        return next((own for value, own in self._values if value is returned), returned)


def _replaced(own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the value with the derivative of `own`, for optimizers that call backward() themselves."""
    if not own.requires_grad:
        return value
    apply: Any = _Replaced.apply  # torch leaves it untyped
    replaced: torch.Tensor = apply(own, value)
    return replaced


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return upstream, None
