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
    assert memory.expected(functools.partial(one_return, 1)) is not None
    assert memory.expected(functools.partial(one_return, (1,))) is None
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
    one, other = torch.ones(1), torch.ones(2)
    memory.learn(step, structure, 1, (plain, one))
    assert memory.expected(step, (plain, other)) == structure
    assert memory.expected(step, (named, one)) is None
    assert memory.expected(step, (torch.nn.Linear(1, 1), one)) is None
    memory.learn(functools.partial(step, called=named), flatten({"loss": 1})[1], {"loss": 1}, (one,))
    assert str(memory.expected(functools.partial(step, called=named), (other,))) == "{'loss': '*'}"


def test_no_more_is_remembered_than_has_a_place() -> None:
    memory, (_, structure) = StructureMemory(), flatten(1)
    for number in range(2000):
        memory.learn(one_return, structure, 1, (str(number),))
    assert memory.expected(one_return, ("0",)) is None
    assert memory.expected(one_return, ("1999",)) == structure


def test_a_number_matters_until_another_has_made_no_difference() -> None:
    memory, (_, structure) = StructureMemory(), flatten(1)
    memory.learn(one_return, structure, 1, (0, 0.5))
    assert memory.expected(one_return, (0, 0.5)) == structure
    assert memory.expected(one_return, (1, 0.5)) is None
    memory.learn(one_return, structure, 1, (1, 0.5))
    assert memory.expected(one_return, (2, 0.5)) == structure
    assert memory.expected(one_return, (2, 0.25)) is None, "that one has always been the same"
    memory.learn(one_return, structure, 1, (2, 0.25))
    assert memory.expected(one_return, (3, 0.125)) == structure
    assert memory.expected(one_return, (3,)) is None


def test_numbers_that_shape_the_nest_are_known_one_by_one() -> None:
    memory = StructureMemory()
    for count in (1, 2, 3):
        memory.learn(one_return, flatten((0,) * count)[1], (0,) * count, (count,))
    for count in (1, 2, 3):
        assert memory.expected(one_return, (count,)) == flatten((0,) * count)[1]
    assert memory.expected(one_return, (4,)) is None
    memory.learn(one_return, flatten(1)[1], 1, (1,))
    memory.learn(one_return, flatten(1)[1], 1, (4,))
    assert memory.expected(one_return, (5,)) is None
