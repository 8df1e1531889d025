"""Iterations over a dataset: calls to the replicas, hooks, modes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from torch import nn

import raydist as rd
from raydist.training.passes import Executions, in_evaluation_mode, num_batches, run_pass
from tests.training.toys import regression


def steps_and_hooks(
    batches: int, *, size: int = 1, limit: int | None = None, stop_after: int = 99
) -> tuple[int, list[str]]:
    hooks: list[str] = []
    calls = Executions(rd.OneDeviceStrategy("cpu"), lambda batch: None, iter(range(batches)), steps_per_execution=size)
    steps = run_pass(
        calls,
        begin=lambda step: hooks.append(f"begin {step}"),
        end=lambda done: hooks.append(f"end {done}"),
        limit=limit,
        stopped=lambda: len(hooks) >= stop_after,
    )
    return steps, hooks


def test_hooks_are_around_each_execution() -> None:
    assert steps_and_hooks(2) == (2, ["begin 0", "end 1", "begin 1", "end 2"])
    assert steps_and_hooks(3, size=2) == (3, ["begin 0", "end 2", "begin 2", "end 3"])


def test_limit_and_stop() -> None:
    assert steps_and_hooks(9, limit=3, size=2) == (3, ["begin 0", "end 2", "begin 2", "end 3"])
    assert steps_and_hooks(9, stop_after=2) == (1, ["begin 0", "end 1"])
    assert steps_and_hooks(0) == (0, [])


def test_the_number_of_batches_if_it_is_known() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    assert num_batches(strategy.distribute_dataset(regression(10, 4))) == 3
    assert num_batches(strategy.distribute_dataset(regression(10, 4).repeat())) is None


def test_training_flags_come_back_after_an_error() -> None:
    net = nn.Sequential(nn.Dropout(), nn.Dropout())
    net[1].eval()
    with contextlib.suppress(ZeroDivisionError), in_evaluation_mode(net):
        assert not any(part.training for part in net.modules())
        raise ZeroDivisionError
    assert [part.training for part in net.modules()] == [True, True, False]


def counts(batches: int, limits: list[int | None], *, size: int, known: bool) -> tuple[list[int], list[Any], bool]:
    """Steps of each execution while ready, the batches seen, and whether it is ready for more."""
    seen: list[Any] = []
    calls = Executions(
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
    calls = Executions(rd.OneDeviceStrategy("cpu"), seen.append, iter([1, 2]))
    assert calls.ready()
    assert calls.ready()
    calls.execute(None)
    assert seen == [1]
