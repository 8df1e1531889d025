"""Load states into objects, and roll back if one of the objects raises."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, final

from torch import nn

from raydist.checkpoints.saved_kinds import give_state, kind_of_state, state_of
from raydist.errors import InvalidArgumentError, RaydistError

__all__ = ["GivenStates"]

# First the kinds whose load_state_dict may raise. Modules were checked before and come last: their tensors are
# overwritten in place, while the other kinds replace tensors, so that the previous states can be restored.
_ORDER = ("other", "metric", "optimizer", "module")


@final
class GivenStates:
    """The states that objects were given in one restore.

    Args:
        objects: Objects by name; objects without a state in `give` stay unchanged.
        modules: All modules of the checkpoint: they name the parameters of optimizers.
        strict: Require that a module or an optimizer finds all of its entries, and no others.
    """

    def __init__(self, objects: Mapping[str, Any], modules: Mapping[str, nn.Module], strict: bool) -> None:
        self._objects = objects
        self._modules = modules
        self._strict = strict
        self._before: dict[str, Any] = {}
        self._given: list[str] = []

    def give(self, states: Mapping[str, Any]) -> None:
        """Load states into the objects. If one raises, restore the previous states of those changed before.

        Raises:
            InvalidArgumentError: An object rejects its state; the message names the object.
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
            with contextlib.suppress(Exception):  # possibly changed in part; the original error counts
                self._give_back(name)
            if isinstance(error, RaydistError) or not isinstance(error, Exception):
                raise
            raise InvalidArgumentError(
                f"The saved state of {name!r} must be one that a {type(obj).__name__} takes, but load_state_dict "
                f"says: {error!s:.500} ({type(error).__name__}). Restore into one like that which was saved."
            ) from error

    def give_back(self) -> None:
        """Restore the previous states of all changed objects except modules."""
        for name in self._given:
            self._give_back(name)

    def _give_back(self, name: str) -> None:
        if name in self._before:
            give_state(self._objects[name], self._before[name], self._modules)
