"""The check of a strategy that ships nothing: that a step uses only what was made under the scope.

Strategies with replicas find out when they pickle a step. Here the step is walked instead, and again when a place where
the walk met a module, a parameter or an optimizer holds another one. That look takes some microseconds; it goes no
deeper into a module than to its own children, so the walk is also done again for runs 2, 4, 8, and so on.
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
    """A step that was walked.

    Attributes:
        parts: The function, or a method's function and object: once one of them is gone, so is the step.
        places: What led to the things that were checked.
        runs: How often it has run.
    """

    parts: tuple[weakref.ref[Any], ...]
    places: list[WatchedPlace]
    runs: int

    def holds(self) -> bool:
        """Whether the check need not be made again."""
        self.runs += 1
        if self.runs & (self.runs - 1) == 0:
            return False
        return all(place.is_same() for place in self.places)


@final
class CheckedSteps:
    """Steps that use nothing but what was made under one strategy's scope.

    Args:
        name: The strategy, for messages.
        device: The kind of its device.

    Attributes:
        scope: What is made under it.
    """

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.scope = Scope()
        self._origin = Origin(name, self.scope, lambda: (device,), lambda _: False, lambda: (), serves_rows=True)
        self._checked: dict[Hashable, _Checked] = {}

    def check(self, fn: Any, arguments: Iterable[Any]) -> None:
        """See that a step may run.

        Args:
            fn: The step function.
            arguments: The leaves of its arguments.

        Raises:
            FailedPreconditionError: It uses what was not made under the scope, or belongs to another strategy.
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
        except TypeError:  # some callable object: it is walked in each run
            return
        self._checked[key] = _Checked(anchors, places, runs)

    def _walk(self, roots: Sequence[Any], most: int = _MOST_OBJECTS) -> list[WatchedPlace]:
        """Check all that is reached, the nearest first; the places to look at again."""
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
