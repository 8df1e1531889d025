"""Steps that return another nest because of what they hold or are given: each result is what its step returned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import raydist as rd
from tests.strategies.replica_rows import rows

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


class Trainer:
    heads: tuple[str, ...] = ("a",)

    def train(self, x: torch.Tensor) -> Any:
        return x.sum()

    def test(self, x: torch.Tensor) -> Any:
        return {"sum": x.sum(), "n": x}

    def by_head(self, x: torch.Tensor) -> Any:
        return {head: x.sum() for head in self.heads}


def decorated(fn: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        return fn(*args)

    return wrapper


def naming(names: Any) -> Callable[[torch.Tensor], Any]:
    def step(x: torch.Tensor) -> Any:
        return {name: x.sum() for name in names}

    return step


def test_methods_in_a_decorator_and_attributes_of_self(two: rd.MirroredStrategy) -> None:
    x, trainer = rows(two, [[1.0], [2.0]]), Trainer()
    for wrap in (lambda fn: fn, functools.partial):
        assert two.reduce("SUM", two.run(decorated(wrap(trainer.train)), args=(x,))) == 3
        assert two.reduce("SUM", two.run(decorated(wrap(trainer.test)), args=(x,))["sum"]) == 3
    for heads in (("a",), ("a", "b")):
        trainer.heads = heads
        assert tuple(two.run(trainer.by_head, args=(x,))) == heads


@pytest.mark.parametrize("kind", [tuple, list])
def test_plain_data_that_a_step_encloses(two: rd.MirroredStrategy, kind: type) -> None:
    x = rows(two, [[1.0], [2.0]])
    for names in (["a"], ["b"], ["a", "b"]) * 2:
        result = two.run(naming(kind(names)), args=(x,))
        assert [two.reduce("SUM", result[name]) for name in names] == [3] * len(names)


def test_the_nests_of_arguments(two: rd.MirroredStrategy) -> None:
    x = rows(two, [[1.0], [2.0]])

    def same(given: Any) -> Any:
        return given

    assert two.reduce("SUM", two.run(same, args=({"u": x},))["u"], axis=0) == 3
    assert two.reduce("SUM", two.run(same, args=({"v": x},))["v"], axis=0) == 3
    assert two.reduce("SUM", two.run(same, args=(x,)), axis=0) == 3

    def named(**given: Any) -> Any:
        return given

    for name in ("u", "v"):
        assert two.reduce("SUM", two.run(named, kwargs={name: x})[name], axis=0) == 3
