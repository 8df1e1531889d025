from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.training.executions import executions
from raydist.training.passes import distributed, in_evaluation_mode, num_batches, run_pass
from tests.training.toys import regression


def steps_and_hooks(
    batches: int, *, size: int = 1, limit: int | None = None, stop_after: int = 99
) -> tuple[int, list[str]]:
    hooks: list[str] = []
    calls = executions(rd.OneDeviceStrategy("cpu"), lambda batch: None, iter(range(batches)), steps_per_execution=size)
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


def test_a_distributed_dataset_is_taken_as_it_is() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    data = strategy.distribute_dataset(regression(10, 4))
    assert distributed(strategy, data) is data
    assert num_batches(data) == 3
    assert num_batches(distributed(strategy, regression(10, 4).repeat())) is None


def test_other_data_is_refused() -> None:
    with pytest.raises(rd.SpecError, match=r"must be a raydist.Dataset .* got Tensor.*from_tensor_slices"):
        distributed(rd.OneDeviceStrategy("cpu"), torch.ones(3))


def test_training_flags_come_back_after_an_error() -> None:
    net = nn.Sequential(nn.Dropout(), nn.Dropout())
    net[1].eval()
    with contextlib.suppress(ZeroDivisionError), in_evaluation_mode(net):
        assert not any(part.training for part in net.modules())
        raise ZeroDivisionError
    assert [part.training for part in net.modules()] == [True, True, False]
