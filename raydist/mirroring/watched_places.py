"""References to modules, parameters and optimizers that a walk of a step met, for a fast comparison later."""

from __future__ import annotations

import types
import weakref
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from raydist.class_memory import remembered_by_class
from raydist.compat.torch_internals import module_table, parameter_table
from raydist.pickling.attribute_table import attributes
from raydist.pickling.by_value import referenced_globals

__all__ = ["WatchedPlace", "is_of_strategy", "trained_by", "watch"]


@remembered_by_class
def is_of_strategy(cls: Any) -> bool:
    """Return True if objects of a class must belong to one strategy."""
    return issubclass(cls, torch.nn.Module | torch.nn.Parameter | torch.optim.Optimizer | LRScheduler) or (
        issubclass(cls, torch.Tensor) and cls is not torch.Tensor
    )


@final
@dataclass(frozen=True, slots=True)
class WatchedPlace:
    """An object and the ids of the objects that it referenced. Keeps none of them alive.

    Attributes:
        holder: The object.
        named: Names of the holder's attributes or globals, with the ids of their values.
        cells: Indices of a function's closure cells, with the ids of their values.
        children: Ids of the direct children of a module or an optimizer; None for other objects.
    """

    holder: weakref.ref[Any]
    named: tuple[tuple[str, int], ...] = ()
    cells: tuple[tuple[int, int], ...] = ()
    children: tuple[int, ...] | None = None

    def is_same(self) -> bool:
        """Return True if all recorded references are unchanged; added variables of the holder do not count."""
        holder = self.holder()
        if holder is None:
            return False
        if self.children is not None:
            return _children(holder) == self.children
        variables = holder.__globals__ if type(holder) is types.FunctionType else attributes(holder)
        for name, held in self.named:
            if id(variables.get(name)) != held:
                return False
        return not self.cells or self._has_same_cells(holder.__closure__)

    def _has_same_cells(self, closure: tuple[types.CellType, ...]) -> bool:
        try:
            return all(id(closure[index].cell_contents) == held for index, held in self.cells)
        except ValueError:  # the variable was deleted
            return False


def watch(obj: Any) -> WatchedPlace | None:
    """Record the references of `obj`; None if there are none to compare, or `obj` has no weak references."""
    if isinstance(obj, torch.nn.Module | torch.optim.Optimizer):
        return WatchedPlace(weakref.ref(obj), children=_children(obj))
    try:
        named = {name: value for name, value in _variables(obj).items() if _counts(value)}
        cells = {index: value for index, value in enumerate(_cells(obj)) if _counts(value)}
        place = WatchedPlace(
            weakref.ref(obj),
            tuple((name, id(value)) for name, value in named.items()),
            tuple((index, id(value)) for index, value in cells.items()),
        )
    except TypeError:  # no weak references to `obj`
        return None
    return place if place.named or place.cells else None


def _variables(obj: Any) -> dict[str, Any]:
    if type(obj) is types.FunctionType:
        return referenced_globals(obj)
    try:
        return {} if isinstance(obj, type) else attributes(obj)
    except AttributeError:
        return {}


def _cells(obj: Any) -> list[Any]:
    if type(obj) is not types.FunctionType:
        return []
    return [_content(cell) for cell in obj.__closure__ or ()]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _counts(value: Any) -> bool:
    return type(value) is types.FunctionType or is_of_strategy(type(value))


def _children(obj: Any) -> tuple[int, ...]:
    if isinstance(obj, torch.optim.Optimizer):
        return tuple(map(id, trained_by(obj)))
    return (*map(id, parameter_table(obj).values()), *map(id, module_table(obj).values()))


def trained_by(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    groups: list[dict[str, Any]] = attributes(optimizer)["param_groups"]
    return [parameter for group in groups for parameter in group["params"]]
