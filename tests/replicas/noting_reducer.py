"""A stand-in for the reducer of gradients, where none are reduced."""

from __future__ import annotations

from typing import Any

from raydist.core.values import ReduceOp

__all__ = ["NotingReducer"]


class NotingReducer:
    """Notes with which weights steps were opened."""

    def __init__(self) -> None:
        self.opened: list[tuple[float, bool]] = []

    def make_global(self, parameters: Any, **how: Any) -> bool:
        """Nothing to reduce here."""
        return False

    def attach(self, parameters: Any) -> None:
        """Nothing to reduce here."""

    def weigh(self, weight: float, op: ReduceOp, *, empty: bool) -> tuple[float, bool]:
        return weight, empty

    def begin_step(self, weight: tuple[float, bool], adds_up: bool) -> None:
        self.opened.append(weight)

    def end_step(self) -> None:
        """Nothing was begun."""
