from __future__ import annotations

import gc
import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from raydist.pickling.unchanged import SettledFunctions


class Handled:
    """Stands for what travels as a handle."""


def is_handled(obj: Any) -> bool:
    return isinstance(obj, Handled)


def is_settled(fn: Any) -> bool:
    settled = SettledFunctions()
    settled.remember(fn, b"digest", is_handled)
    return settled.digest_of(fn) == b"digest"


def closure(value: Any) -> Callable[[], Any]:
    def fn() -> Any:
        return value

    return fn


SCALE = 2.0
HELD = Handled()


def uses_globals(x: Any) -> Any:
    return F.relu(torch.as_tensor(x)) * SCALE, HELD, math.pi, np.sum, len


def recursive(x: int) -> int:
    return recursive(x - 1) if x else 0


def with_default(x: int = 3) -> int:
    return x


def with_annotations(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    "fn",
    [
        uses_globals,
        recursive,
        with_default,
        with_annotations,
        closure(Handled()),
        closure((1, "a", None, (2.0, b"x"))),
        closure(F.cross_entropy),
        closure(torch.relu),
        closure(torch.nn.Linear),
        closure(closure(Handled())),
        lambda: 1,
    ],
)
def test_what_depends_on_fixed_objects_is_settled(fn: Any) -> None:
    assert is_settled(fn)


class Trainer:
    def step(self) -> None: ...


def with_keywords(*, x: int = 3) -> int:
    return x


def with_attributes() -> None: ...


with_attributes.mode = "train"  # type: ignore[attr-defined]  # what is tested: a function that carries more


@pytest.mark.parametrize(
    "fn",
    [
        closure([1]),
        closure({"a": 1}),
        closure(np.zeros(2)),
        closure(torch.zeros(2)),
        closure((1, [2])),
        closure(Trainer()),
        closure(closure([1])),
        closure([].append),
        closure(types.ModuleType("mine")),
        Trainer().step,
        Trainer,
        with_keywords,
        with_attributes,
    ],
)
def test_what_can_change_inside_is_not(fn: Any) -> None:
    assert not is_settled(fn)


def test_nothing_is_known_of_what_was_not_remembered() -> None:
    settled = SettledFunctions()
    assert settled.digest_of(recursive) == b""
    settled.remember(recursive, b"", is_handled)
    assert settled.digest_of(recursive) == b""
    settled.remember(recursive, b"x", is_handled)
    settled.forget()
    assert settled.digest_of(recursive) == b""


def test_an_assignment_in_the_closure_is_seen() -> None:
    value: Any = 1

    def fn() -> Any:
        return value

    settled = SettledFunctions()
    settled.remember(fn, b"d", is_handled)
    assert settled.digest_of(fn) == b"d"
    value = 2
    assert settled.digest_of(fn) == b""
    value = 1
    assert settled.digest_of(fn) == b"d"


def test_an_assignment_in_the_closure_of_a_function_that_is_called_is_seen() -> None:
    held: Any = Handled()

    def inner() -> Any:
        return held

    def outer() -> Any:
        return inner()

    settled = SettledFunctions()
    settled.remember(outer, b"d", is_handled)
    assert settled.digest_of(outer) == b"d"
    held = Handled()
    assert settled.digest_of(outer) == b""


def test_an_object_that_died_is_not_the_same() -> None:
    held: Any = Handled()

    def fn() -> Any:
        return held

    settled = SettledFunctions()
    settled.remember(fn, b"d", is_handled)
    held = None
    gc.collect()
    assert settled.digest_of(fn) == b""


def test_assignments_to_globals_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = SettledFunctions()
    settled.remember(uses_globals, b"d", is_handled)
    assert settled.digest_of(uses_globals) == b"d"
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert settled.digest_of(uses_globals) == b""
    monkeypatch.undo()
    assert settled.digest_of(uses_globals) == b"d"
    monkeypatch.setitem(globals(), "len", lambda _: 0)  # hides a builtin
    assert settled.digest_of(uses_globals) == b""


def test_new_defaults_and_new_code_are_seen() -> None:
    def fn(x: int = 3) -> int:
        return x

    settled = SettledFunctions()
    settled.remember(fn, b"d", is_handled)
    fn.__defaults__ = (4,)
    assert settled.digest_of(fn) == b""
    settled.remember(fn, b"d", is_handled)
    fn.__code__ = with_default.__code__
    assert settled.digest_of(fn) == b""


def test_what_is_remembered_keeps_nothing_alive() -> None:
    settled = SettledFunctions()
    held = Handled()
    fn = closure(held)
    held.fn = fn  # type: ignore[attr-defined]  # a circle through what was remembered
    settled.remember(fn, b"d", is_handled)
    assert settled.digest_of(fn) == b"d"
    gone = weakref.ref(held)
    del fn, held
    gc.collect()
    assert gone() is None
