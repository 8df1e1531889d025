"""The scope check for strategies without replicas: a step may only use objects that were created under the scope.

Strategies with replicas check this when they pickle a step. Here the objects that a step references are walked instead,
and walked again when a reference to a module, a parameter or an optimizer has changed. Comparing references takes some
microseconds and covers only the direct children of a module, so the walk also runs again for runs 2, 4, 8, and so on.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from raydist.class_memory import remembered_by_class
from raydist.compat.torch_internals import module_table, parameter_table
from raydist.mirroring.scope import Origin, Scope
from raydist.pickling.attribute_table import attributes
from raydist.pickling.by_value import referenced_globals, references_of

__all__ = ["CheckedSteps", "WatchedPlace", "is_of_strategy", "trained_by", "watch"]


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


_MOST_OBJECTS = 20_000
_MOST_ARGUMENTS = 200  # looked at in every run
_LEAVES = (bool, int, float, complex, str, bytes, type(None), types.CodeType, types.ModuleType)


@final
@dataclass(slots=True)
class _Checked:
    """The record of a step that was walked.

    Attributes:
        parts: The function, or the function and object of a method; once one of them is gone, the record goes too.
        places: The references that led to the checked objects.
        runs: Number of runs so far.
    """

    parts: tuple[weakref.ref[Any], ...]
    places: list[WatchedPlace]
    runs: int

    def holds(self) -> bool:
        """Count a run; return True if the step need not be walked again."""
        self.runs += 1
        if self.runs & (self.runs - 1) == 0:
            return False
        return all(place.is_same() for place in self.places)


@final
class CheckedSteps:
    """The step functions that passed the scope check of one strategy.

    Args:
        name: Name of the strategy, for messages.
        device: Device type of the strategy.

    Attributes:
        scope: The objects that were created under the strategy.
    """

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.scope = Scope()
        self._origin = Origin(name, self.scope, lambda: (device,), lambda _: False, lambda: (), serves_rows=True)
        self._checked: dict[Hashable, _Checked] = {}

    def check(self, fn: Any, arguments: Iterable[Any]) -> None:
        """Check that a step may run.

        Args:
            fn: The step function.
            arguments: The leaves of the step's arguments.

        Raises:
            FailedPreconditionError: The step uses an object of another strategy, or one not created under the scope.
        """
        parts = (fn.__func__, fn.__self__) if type(fn) is types.MethodType else (fn,)
        key = tuple(map(id, parts))
        known = self._checked.get(key)
        if known is None or not known.holds():
            self._remember(key, parts, self._walk(parts), 1 if known is None else known.runs)
        given = [leaf for leaf in arguments if type(leaf) is not torch.Tensor and not isinstance(leaf, _LEAVES)]
        if given:
            self._walk(given, _MOST_ARGUMENTS)

    def _remember(self, key: Hashable, parts: Sequence[Any], places: list[WatchedPlace], runs: int) -> None:
        def forget(_: Any) -> None:
            self._checked.pop(key, None)

        try:
            anchors = tuple(weakref.ref(part, forget) for part in parts)
        except TypeError:  # a callable without weak references: walked in each run
            return
        self._checked[key] = _Checked(anchors, places, runs)

    def _walk(self, roots: Sequence[Any], most: int = _MOST_OBJECTS) -> list[WatchedPlace]:
        """Check every reachable object, breadth first; return the references to compare before the next run."""
        waiting, seen = deque(roots), set[int]()
        checked: list[Any] = []
        places: list[WatchedPlace | None] = []
        inner: set[int] = set()
        while waiting and len(seen) < most:
            obj = waiting.popleft()
            if isinstance(obj, _LEAVES) or id(obj) in seen:
                continue
            seen.add(id(obj))
            references = list(_references(obj))
            if is_of_strategy(type(obj)):
                self._origin.refuse_foreign(obj)
                checked.append(obj)
                inner.update(map(id, references))
            if id(obj) not in inner:
                places.append(watch(obj))
            waiting.extend(references)
        self._origin.require(checked)
        return [place for place in places if place is not None]


def _references(obj: Any) -> Iterator[Any]:
    if isinstance(obj, torch.nn.Module):
        held = attributes(obj)
        yield from parameter_table(obj).values()
        yield from module_table(obj).values()
        yield from [value for name, value in held.items() if name[:1] != "_"]
    elif isinstance(obj, torch.optim.Optimizer):
        yield from trained_by(obj)
    elif isinstance(obj, LRScheduler):
        yield attributes(obj).get("optimizer")
    elif not isinstance(obj, torch.Tensor):
        yield from references_of(obj)
