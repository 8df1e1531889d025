"""The scope check for strategies without replicas: a step may only use objects that were created under the scope.

Strategies with replicas check this when they pickle a step. Here the objects that a step references are walked instead,
and walked again when a reference to a module, a parameter or an optimizer has changed. Comparing references takes some
microseconds and covers only the direct children of a module, so the walk also runs again for runs 2, 4, 8, and so on.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from raydist.compat.torch_internals import module_table, parameter_table
from raydist.core.weak_class_cache import remembered_by_class
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.object_kinds import held_parameters
from raydist.mirroring.scope import Scope, ScopeCheck
from raydist.pickling.attribute_table import attributes
from raydist.pickling.by_value import closure_variables, referenced_globals, references_of

_MOST_OBJECTS = 20_000
_MOST_ARGUMENTS = 200  # looked at in every run
_LEAVES = (bool, int, float, complex, str, bytes, type(None), types.CodeType, types.ModuleType)


@final
@dataclass(slots=True)
class _Checked:
    """The record of a step that was walked. Keeps no object of the step alive.

    Attributes:
        parts: The function, or the function and object of a method; once one of them is gone, the record goes too.
        watched: Objects, each with the ids of the modules, parameters, ... that it referenced directly.
        runs: Number of runs so far.
    """

    parts: tuple[weakref.ref[Any], ...]
    watched: list[tuple[weakref.ref[Any], tuple[int, ...]]]
    runs: int

    def holds(self) -> bool:
        """Count a run; return True if the step need not be walked again."""
        self.runs += 1
        if self.runs & (self.runs - 1) == 0:
            return False
        found = ((reference(), ids) for reference, ids in self.watched)
        return all(obj is not None and _watched_ids(obj) == ids for obj, ids in found)


@final
class CheckedSteps:
    """The step functions that passed the scope check of one strategy, whose name is for messages.

    Attributes:
        scope: The objects that were created under the strategy.
    """

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.scope = Scope()
        self._scope_check = ScopeCheck(name, self.scope, lambda: (device,), DriverTable(), serves_rows=lambda: True)
        self._checked: dict[Hashable, _Checked] = {}

    def check(self, fn: Any, arguments: Iterable[Any]) -> None:
        """Check that a step may run with arguments of these leaves.

        Raises:
            FailedPreconditionError: The step uses an object of another strategy, or one not created under the scope.
        """
        parts = (fn.__func__, fn.__self__) if type(fn) is types.MethodType else (fn,)
        key = tuple(map(id, parts))
        known = self._checked.get(key)
        if known is None or not known.holds():
            watched = self._walk(parts)
            with contextlib.suppress(TypeError):  # a callable without weak references is walked in each run
                anchors = tuple(weakref.ref(part, lambda _: self._checked.pop(key, None)) for part in parts)
                self._checked[key] = _Checked(anchors, watched, 1 if known is None else known.runs)
        given = [leaf for leaf in arguments if type(leaf) is not torch.Tensor and not isinstance(leaf, _LEAVES)]
        if given:
            self._walk(given, _MOST_ARGUMENTS)

    def _walk(self, roots: Sequence[Any], most: int = _MOST_OBJECTS) -> list[tuple[weakref.ref[Any], tuple[int, ...]]]:
        """Check every reachable object, breadth first; return the references to compare before the next run."""
        waiting, seen = deque(roots), set[int]()
        checked: list[Any] = []
        watched: list[tuple[weakref.ref[Any], tuple[int, ...]]] = []
        inner: set[int] = set()
        while waiting and len(seen) < most:
            obj = waiting.popleft()
            if isinstance(obj, _LEAVES) or id(obj) in seen:
                continue
            seen.add(id(obj))
            references = list(_references(obj))
            if _is_of_strategy(type(obj)):
                self._scope_check.refuse_foreign(obj)
                checked.append(obj)
                inner.update(map(id, references))
            if id(obj) not in inner and (ids := _watched_ids(obj)):
                with contextlib.suppress(TypeError):  # no weak references to `obj`
                    watched.append((weakref.ref(obj), ids))
            waiting.extend(references)
        self._scope_check.require(checked)
        return watched


@remembered_by_class
def _is_of_strategy(cls: Any) -> bool:
    """Return True if objects of a class must belong to one strategy."""
    return issubclass(cls, torch.nn.Module | torch.nn.Parameter | torch.optim.Optimizer | LRScheduler) or (
        issubclass(cls, torch.Tensor) and cls is not torch.Tensor
    )


def _references(obj: Any) -> Iterator[Any]:
    if isinstance(obj, torch.nn.Module):
        yield from _children(obj)
        yield from [value for name, value in attributes(obj).items() if name[:1] != "_"]
    elif isinstance(obj, torch.optim.Optimizer):
        yield from held_parameters(obj)
    elif isinstance(obj, LRScheduler):
        yield attributes(obj).get("optimizer")
    elif not isinstance(obj, torch.Tensor):
        yield from references_of(obj)


def _children(module: torch.nn.Module) -> list[Any]:
    return [*parameter_table(module).values(), *module_table(module).values()]


def _watched_ids(obj: Any) -> tuple[int, ...]:
    """Return the ids of the functions, modules, parameters and optimizers that an object references directly."""
    if isinstance(obj, torch.nn.Module):
        return tuple(map(id, _children(obj)))
    if isinstance(obj, torch.optim.Optimizer):
        return tuple(map(id, held_parameters(obj)))
    found: list[Any] = []
    if type(obj) is types.FunctionType:
        found += [*referenced_globals(obj).values(), *closure_variables(obj).values()]
    elif not isinstance(obj, type):
        with contextlib.suppress(AttributeError):
            found += attributes(obj).values()
    return tuple(id(each) for each in found if type(each) is types.FunctionType or _is_of_strategy(type(each)))
