"""What leads to a mirrored object."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from raydist.pickling.by_value import Reach, referenced_globals


class Target:
    """Stands for a mirrored object."""


TARGET = Target()
OTHER = [1, 2, 3]


def direct() -> object:
    return TARGET


def nested() -> Callable[[], object]:
    return lambda: TARGET


def through() -> object:
    return direct()


def innocent(*_: object) -> object:
    return OTHER


def recursive(n: int) -> object:
    return recursive(n - 1) if n else OTHER


@functools.wraps(direct)
def wrapped() -> object:
    return OTHER


class Holder:
    attribute: Any = None

    def __init__(self, value: object) -> None:
        self.value = value

    def method(self) -> object:
        return self.value


class GlobalMethod:
    def method(self) -> object:
        return TARGET


class Property:
    @property
    def target(self) -> object:
        return TARGET


class Static:
    @staticmethod
    def target() -> object:
        return TARGET


class Inherits(GlobalMethod):
    pass


def closure() -> Callable[[], object]:
    held = {"deep": [(TARGET,)]}
    return lambda: held


def unset_closure() -> Callable[[], object]:
    def inner() -> object:
        return later

    if OTHER:
        return inner
    later = TARGET
    return inner


def default(value: object = TARGET) -> object:
    return value


def keyword(*, value: object = TARGET) -> object:
    return value


LOOP: list[Any] = []
LOOP.append(LOOP)


def reach() -> Reach:
    return Reach(lambda obj: isinstance(obj, Target))


@pytest.mark.parametrize(
    "obj",
    [direct, nested, through, closure(), default, keyword, wrapped, functools.partial(innocent, TARGET)]
    + [functools.partial(direct), Holder(TARGET), Holder(TARGET).method, GlobalMethod, GlobalMethod().method]
    + [GlobalMethod(), Property, Property(), Static, Static.target, Inherits, Inherits(), [{"a": direct}], {TARGET}],
)
def test_reaches(obj: Any) -> None:
    assert reach().reaches(obj)


@pytest.mark.parametrize(
    "obj",
    [innocent, recursive, unset_closure(), Holder(1), Holder(1).method, Holder, LOOP, torch.nn.Linear, torch.relu]
    + [len, "text", None, functools.partial(innocent, 1), types.SimpleNamespace],
)
def test_does_not_reach(obj: Any) -> None:
    assert not reach().reaches(obj)


def test_answers_do_not_depend_on_the_order() -> None:
    one = reach()
    assert [one.reaches(obj) for obj in (innocent, through, direct, recursive, through)] == [
        False,
        True,
        True,
        False,
        True,
    ]


def test_library_functions_go_by_name() -> None:
    assert not reach().by_value(torch.nn.functional.relu)  # type: ignore[arg-type]
    assert not reach().by_value(functools.partial)
    assert reach().by_value(direct)  # type: ignore[arg-type]
    assert not reach().by_value(innocent)  # type: ignore[arg-type]


def test_globals_of_nested_code() -> None:
    assert referenced_globals(nested) == {"TARGET": TARGET}  # type: ignore[arg-type]


def test_values_of_a_users_module() -> None:
    module = types.ModuleType("someones_code")
    vars(module).update(target=TARGET, number=1, function=direct, torch=torch)
    assert set(reach().module_values(module)) == {"target", "function"}
    assert reach().module_values(torch) == {}
