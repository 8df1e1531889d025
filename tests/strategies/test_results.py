"""Results of steps: their structure and classes, and those of two strategies in one program."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from tests.returned_classes import Cache, Encoding, Frozen, ModelOutput, Output, Pair
from tests.strategies.replica_rows import rows

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


class Trainer:
    heads: tuple[str, ...] = ("a",)

    def by_head(self, x: torch.Tensor) -> Any:
        return {head: x.sum() for head in self.heads}


def naming(names: Any) -> Callable[[torch.Tensor], Any]:
    def step(x: torch.Tensor) -> Any:
        return {name: x.sum() for name in names}

    return step


def test_another_structure_than_in_the_last_call_is_an_error_where_it_is_read_and_known_from_then_on(
    two: rd.MirroredStrategy,
) -> None:
    x, trainer = rows(two, [[1.0], [2.0]]), Trainer()
    for _ in range(2):
        assert two.reduce("SUM", two.run(trainer.by_head, args=(x,))["a"]) == 3
    trainer.heads = ("a", "b")
    result = two.run(trainer.by_head, args=(x,))
    with pytest.raises(rd.InvalidArgumentError, match=r"same structure in every call, got \{'a'.*before and .*'b'"):
        two.reduce("SUM", result["a"])
    assert two.reduce("SUM", two.run(trainer.by_head, args=(x,))["b"]) == 3


def test_a_step_that_returned_none_is_not_waited_for_and_a_value_in_its_place_is_an_error(
    two: rd.MirroredStrategy,
) -> None:
    def step(x: torch.Tensor, returns: bool, seconds: float = 0.0) -> torch.Tensor | None:
        time.sleep(seconds)
        return x.sum() if returns else None

    x = rows(two, [[1.0], [2.0]])
    assert two.run(step, args=(x, False)) is None
    began = time.monotonic()
    assert two.run(step, args=(x, False, 1.0)) is None
    assert time.monotonic() - began < 0.9
    assert two.run(step, args=(x, True)) is None
    with pytest.raises(rd.InvalidArgumentError, match="returned a value, and `run` had returned None"):
        two.local_results(two.run(lambda: 1))
    assert two.local_results(two.run(lambda: 1)) == (1, 1)


def test_nests_follow_plain_data_that_a_step_encloses_and_its_arguments(two: rd.MirroredStrategy) -> None:
    x = rows(two, [[1.0], [2.0]])
    for kind in (tuple, list):
        for names in (["a"], ["b"], ["a", "b"]) * 2:
            result = two.run(naming(kind(names)), args=(x,))
            assert [two.reduce("SUM", result[name]) for name in names] == [3] * len(names)

    def same(given: Any) -> Any:
        return given

    for given in ({"u": x}, {"u": x, "v": {"w": x}}):
        again = functools.partial(same)  # another function object: nothing is assumed
        assert two.reduce("SUM", two.run(again, args=(given,))["u"], axis=0) == 3
    assert two.reduce("SUM", two.run(same, args=(x,)), axis=0) == 3


def test_results_keep_their_classes(two: rd.MirroredStrategy) -> None:
    x = rows(two, [[1.0], [3.0]])

    def step(x: torch.Tensor) -> Any:
        return ModelOutput(loss=x.mean(), logits=x, cache=Cache(4), text="hi")

    for _ in range(3):  # later calls expect the structure of the first
        out = two.run(step, args=(x,))
        assert type(out) is ModelOutput
        assert list(out) == ["loss", "logits", "cache", "text"]
        assert two.reduce("MEAN", out.loss) == 2
        assert two.gather(out["logits"], axis=0).tolist() == [1, 3]
        local = two.local_results(out)
        assert [(type(one), one.loss.item(), one["loss"].item(), one.text) for one in local] == [
            (ModelOutput, 1, 1, "hi"),
            (ModelOutput, 3, 3, "hi"),
        ]
        assert [(type(cache), cache.size) for cache in two.local_results(out.cache)] == [(Cache, 4)] * 2
        with pytest.raises(rd.SpecError, match="In the leaf 'cache' of the ModelOutput"):
            two.reduce("MEAN", out)


def test_objects_of_every_kind_come_back_and_are_arguments_as_on_one_device(two: rd.MirroredStrategy) -> None:
    def make() -> Any:
        return Output(loss=torch.tensor(1.0), z=None), Pair((1, Frozen(1.5))), Encoding({"b": 1, "a": 2}, 3)

    expected = make()
    for local in two.local_results(two.run(make)):
        assert [type(one) for one in local] == [Output, Pair, Encoding]
        assert repr(local) == repr(expected)
        assert local[1][1].double == 3
        assert local[2].count == 3
    x = rows(two, [[1.0], [2.0]])

    def step(given: Any) -> Any:
        return type(given).__name__, sum(given.values()).item()

    for given in (Encoding({"x": x}, 1), Output(loss=x), ModelOutput(logits=x)):
        name = type(given).__name__
        assert two.local_results(two.run(step, args=(given,))) == ((name, 1), (name, 2))


def test_of_two_strategies_one_that_fails_or_is_closed_is_nothing_to_the_other(two: rd.MirroredStrategy) -> None:
    with rd.MirroredStrategy(2, resources_per_replica={"CPU": 0.01}) as other:
        strategies, counts = (two, other), []
        for strategy in strategies:
            with strategy.scope():
                counts.append(nn.Parameter(torch.zeros(())))

        def add(count: nn.Parameter, fails: torch.Tensor) -> torch.Tensor:
            if fails:
                raise KeyError("on purpose")
            return count.data.add_(1)

        for number in range(6):
            fails = [number % 3 == place for place in (1, 2)]  # at first `run` waits for what comes back
            results = [
                strategy.run(add, args=(count, torch.tensor(fail)))
                for strategy, count, fail in zip(strategies, counts, fails, strict=True)
            ]
            for strategy, result, fail in zip(strategies, results, fails, strict=True):
                with pytest.raises(KeyError, match="on purpose") if fail else contextlib.nullcontext():
                    strategy.local_results(result)
        other.close()
        two.run(add, args=(counts[0], torch.tensor(False)))
        assert [count.item() for count in counts] == [5.0, 4.0]
