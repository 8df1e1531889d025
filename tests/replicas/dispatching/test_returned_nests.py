from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from raydist.nest import flatten
from raydist.replicas.dispatching.returned_nests import StructureMemory, returns_nothing


def one_return(x: Any) -> Any:
    loss = x * 2
    return loss


def two_returns(x: Any) -> Any:
    if x:
        return x
    return None


def conditional(x: Any) -> Any:
    return x if x else None


def nothing(x: Any) -> None:
    del x


def early(x: Any) -> None:
    if x:
        return
    nothing(x)


def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any) -> Any:
        result = fn(*args)
        return result

    return wrapper


def test_only_functions_that_end_in_one_place_are_remembered() -> None:
    _, structure = flatten((1, 2))
    for fn, known in [(one_return, True), (two_returns, False), (conditional, False)]:
        memory = StructureMemory()
        memory.learn(fn, structure, (1, 2))
        assert (memory.expected(fn) == structure) is known, fn.__name__


def test_a_none_in_the_result_is_not_trusted() -> None:
    memory = StructureMemory()
    memory.learn(one_return, flatten((1, None))[1], (1, None))
    assert memory.expected(one_return) is None


def test_one_decorator_on_two_functions_is_two_functions() -> None:
    memory = StructureMemory()
    memory.learn(decorate(one_return), flatten(1)[1], 1)
    assert memory.expected(decorate(one_return)) is not None
    assert memory.expected(decorate(two_returns)) is None


def test_partials_and_methods_are_known_by_their_function() -> None:
    memory = StructureMemory()
    memory.learn(functools.partial(one_return, 1), flatten(1)[1], 1)
    assert memory.expected(one_return) is not None
    assert memory.expected(np.add) is None


@pytest.mark.parametrize(
    ("fn", "expected"),
    [(nothing, True), (early, True), (one_return, False), (two_returns, False), (conditional, False), (np.add, False)],
)
def test_returns_nothing(fn: Callable[..., Any], expected: bool) -> None:
    assert returns_nothing(fn) is expected


def test_one_code_over_two_modules_is_two_functions() -> None:
    def calling(module: torch.nn.Module) -> Callable[[], Any]:
        return lambda: module(torch.ones(1))

    memory = StructureMemory()
    first, second = torch.nn.Identity(), torch.nn.Identity()
    memory.learn(calling(first), flatten((1, 2))[1], (1, 2))
    assert memory.expected(calling(first)) is not None
    assert memory.expected(calling(second)) is None


def test_naming_a_function_reads_no_attribute_of_what_it_encloses() -> None:
    class Mirrored(torch.nn.Module):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} was read, which waits for all steps")

    module = Mirrored.__new__(Mirrored)
    memory = StructureMemory()
    memory.learn(lambda: module, flatten(1)[1], 1)
    assert not returns_nothing(lambda: module)


def test_one_code_that_calls_what_it_is_given_is_known_for_each_of_these() -> None:
    def step(called: Any, batch: int) -> Any:
        return called(batch)

    def plain(batch: int) -> int:
        return batch

    def named(batch: int) -> dict[str, int]:
        return {"loss": batch}

    memory, (_, structure) = StructureMemory(), flatten(1)
    memory.learn(step, structure, 1, (plain, 1))
    assert memory.expected(step, (plain, 2)) == memory.expected(functools.partial(step, plain), (3,)) == structure
    assert memory.expected(step, (named, 2)) is None
    assert memory.expected(step, (torch.nn.Linear(1, 1), 2)) is None
    memory.learn(functools.partial(step, called=named), flatten({"loss": 1})[1], {"loss": 1}, (1,))
    assert str(memory.expected(functools.partial(step, called=named), (3,))) == "{'loss': '*'}"
