"""Giving objects their states, and those of before back where one of them refuses what it is given."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, final

from torch import nn

from raydist.checkpoints.saved_kinds import give_state, kind_of_state, state_of
from raydist.errors import InvalidArgumentError, RaydistError

__all__ = ["GivenStates"]

# Those first that may yet refuse a state. What fits a module is known before; its tensors are overwritten in place,
# while those of all others are replaced, so that theirs of before can be given back.
_ORDER = ("other", "metric", "optimizer", "module")


@final
class GivenStates:
    """What objects were given in one restore.

    Args:
        objects: By name; those without a state stay as they are.
        modules: All modules of the checkpoint: they name the parameters of optimizers.
        strict: Whether a module or an optimizer must find all of its entries, and no other.
    """

    def __init__(self, objects: Mapping[str, Any], modules: Mapping[str, nn.Module], strict: bool) -> None:
        self._objects = objects
        self._modules = modules
        self._strict = strict
        self._before: dict[str, Any] = {}
        self._given: list[str] = []

    def give(self, states: Mapping[str, Any]) -> None:
        """Change the objects. Where one refuses its state, those that were changed before get theirs back.

        Raises:
            InvalidArgumentError: One refuses. Names it.
        """
        kinds = {name: kind_of_state(self._objects[name]) for name in states}
        self._before = {
            name: state_of(self._objects[name], self._modules) for name, kind in kinds.items() if kind != "module"
        }
        for name in sorted(states, key=lambda name: _ORDER.index(kinds[name])):
            self._give(name, states[name])

    def _give(self, name: str, state: Any) -> None:
        obj = self._objects[name]
        try:
            give_state(obj, state, self._modules, self._strict)
            self._given.append(name)
        except BaseException as error:
            self.give_back()
            with contextlib.suppress(Exception):  # it may have taken a part; its own error is what must be seen
                self._give_back(name)
            if isinstance(error, RaydistError) or not isinstance(error, Exception):
                raise
            raise InvalidArgumentError(
                f"The saved state of {name!r} must be one that a {type(obj).__name__} takes, but load_state_dict "
                f"says: {error!s:.500} ({type(error).__name__}). Restore into one like that which was saved."
            ) from error

    def give_back(self) -> None:
        """Have all that were changed, but modules, be as they were before."""
        for name in self._given:
            self._give_back(name)

    def _give_back(self, name: str) -> None:
        if name in self._before:
            give_state(self._objects[name], self._before[name], self._modules)
