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

from raydist.compat.torch_internals import module_table, parameter_table
from raydist.mirroring.origin import Origin
from raydist.mirroring.scope import Scope
from raydist.mirroring.watched_places import WatchedPlace, is_of_strategy, trained_by, watch
from raydist.pickling.attribute_table import attributes
from raydist.pickling.by_value import references_of

__all__ = ["CheckedSteps"]

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
