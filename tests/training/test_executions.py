from __future__ import annotations

from typing import Any

import pytest

import raydist as rd
from raydist.training.executions import executions


def counts(batches: int, limits: list[int | None], *, size: int, known: bool) -> tuple[list[int], list[Any], bool]:
    """Steps of each execution while ready, the batches seen, and whether it is ready for more."""
    seen: list[Any] = []
    calls = executions(
        rd.OneDeviceStrategy("cpu"),
        seen.append,
        iter(range(batches)),
        steps_per_execution=size,
        num_batches=batches if known else None,
    )
    done = [calls.execute(limit) for limit in limits if calls.ready()]
    return done, seen, calls.ready()


@pytest.mark.parametrize("known", [True, False])
def test_single_steps_know_the_end_beforehand(known: bool) -> None:
    assert counts(3, [None] * 5, size=1, known=known) == ([1, 1, 1], [0, 1, 2], False)


@pytest.mark.parametrize("known", [True, False])
def test_a_short_execution_is_the_last_one(known: bool) -> None:
    assert counts(5, [None] * 4, size=3, known=known) == ([3, 2], [0, 1, 2, 3, 4], False)


def test_with_a_known_number_no_execution_is_empty() -> None:
    assert counts(6, [None] * 4, size=3, known=True) == ([3, 3], [0, 1, 2, 3, 4, 5], False)
    assert counts(6, [None] * 4, size=3, known=False) == ([3, 3, 0], [0, 1, 2, 3, 4, 5], False)


def test_a_limit_shortens_an_execution_but_ends_nothing() -> None:
    assert counts(6, [2, 5, 1], size=3, known=False) == ([2, 3, 1], [0, 1, 2, 3, 4, 5], True)


def test_asking_twice_loses_no_batch() -> None:
    seen: list[Any] = []
    calls = executions(rd.OneDeviceStrategy("cpu"), seen.append, iter([1, 2]))
    assert calls.ready()
    assert calls.ready()
    calls.execute(None)
    assert seen == [1]
