"""Which checkpoints stay: the newest, some for good, the best."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.checkpoints.retention import Best, KeptCheckpoint, Retention
from raydist.errors import InvalidArgumentError


def kept(*numbers: int, losses: dict[int, float] | None = None, every_s: float = 60.0) -> list[KeptCheckpoint]:
    return [
        KeptCheckpoint(f"ckpt-{n}", n, at, at * every_s, {"loss": losses[n]} if losses and n in losses else {})
        for at, n in enumerate(numbers)
    ]


def removed(rules: Retention, found: list[KeptCheckpoint]) -> list[int]:
    return [each.number for each in rules.to_remove(found, began=0.0)]


def test_the_newest_stay_by_the_order_of_saves_and_not_by_their_numbers() -> None:
    assert removed(Retention(2), kept(100, 200, 3, 4)) == [100, 200]
    assert removed(Retention(None), kept(1, 2, 3)) == []


def test_the_best_stays_beside_the_newest() -> None:
    found = kept(1, 2, 3, 4, losses={1: 2.0, 2: 0.5, 3: 1.0, 4: float("nan")})
    assert removed(Retention(1, best=Best("loss", "min")), found) == [1, 3]
    assert removed(Retention(1, best=Best("loss", "max")), found) == [2, 3]
    assert removed(Retention(1, best=Best("accuracy", "max")), found) == [1, 2, 3]


def test_what_stays_for_good_is_the_same_whenever_one_looks() -> None:
    rules = Retention(1, keep_every_s=120)
    found: list[KeptCheckpoint] = []
    for each in kept(*range(8)):
        found = [*found, each]
        gone = rules.to_remove(found, began=0.0)
        found = [other for other in found if other not in gone]
    assert [each.number for each in found] == [2, 4, 6, 7]


def test_a_clock_that_goes_back_loses_nothing_new() -> None:
    found = [KeptCheckpoint("a-1", 1, 1, 1e9), KeptCheckpoint("a-2", 2, 2, 1e9 - 86400)]
    assert [each.number for each in Retention(1, keep_every_s=60).newest(found)] == [2]


@pytest.mark.parametrize("arguments", [{"max_to_keep": 0}, {"max_to_keep": 1.5}, {"keep_every_s": 0}])
def test_what_keeps_nothing_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a number"):
        Retention(**arguments)


@pytest.mark.parametrize("best", ["loss", ("loss",), ("loss", "least"), (1, "min")])
def test_best_is_a_metric_and_a_direction(best: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="best must be"):
        Best.parse(best)
