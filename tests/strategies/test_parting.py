"""Replicas whose programs part: each kind of it ends in an error on all of them, which says who does what."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import pytest
import torch
from torch import nn

import raydist as rd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

# Below the limit of collectives, far above what it takes (2 s on an idle machine).
_SOON_S = 15.0


@dataclass
class Training:
    """A model in training, and what a program does with it in a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    @classmethod
    def build(cls) -> Self:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return cls(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.model(x).mean()
        return value

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x).backward()
        self.optimizer.step()


Program = Callable[[Training, Any, int], None]
"""Gets the training, the batch (or the iterator) and the rank; replica 1 is the one that parts."""


def skips_backward(training: Training, x: torch.Tensor, rank: int) -> None:
    training.optimizer.zero_grad()
    if rank != 1:
        training.loss(x).backward()
    training.optimizer.step()


def returns_early(training: Training, x: torch.Tensor, rank: int) -> None:
    if rank != 1:
        training.step(x)


def reduces_once_more(training: Training, x: torch.Tensor, rank: int) -> None:
    training.step(x)
    if rank == 1:
        rd.get_replica_context().all_reduce(rd.ReduceOp.SUM, torch.ones(1))


def reduces_before_backward(training: Training, x: torch.Tensor, rank: int) -> None:
    if rank == 1:
        rd.get_replica_context().all_reduce(rd.ReduceOp.SUM, torch.ones(1))
    training.loss(x).backward()
    if rank != 1:
        rd.get_replica_context().all_reduce(rd.ReduceOp.SUM, torch.ones(1))
    training.optimizer.step()


def gathers_instead(training: Training, x: torch.Tensor, rank: int) -> None:
    context = rd.get_replica_context()
    if rank == 1:
        context.all_gather(torch.ones(1), 0)
    else:
        context.all_reduce(rd.ReduceOp.SUM, torch.ones(1))


def keeps_gradients(training: Training, x: torch.Tensor, rank: int) -> None:
    if rank == 1:
        with rd.get_replica_context().no_sync():
            training.loss(x).backward()
    else:
        training.loss(x).backward()


def leaves_the_loop(training: Training, batches: Any, rank: int) -> None:
    for number, x in enumerate(batches):
        if rank == 1 and number == 2:
            return
        training.step(x)


def passes_over_a_batch(training: Training, batches: Any, rank: int) -> None:
    for number, x in enumerate(batches):
        if not (rank == 1 and number == 2):
            training.step(x)


def skips_a_step(training: Training, x: torch.Tensor, rank: int) -> None:
    training.loss(x).backward()
    if rank != 1:
        training.optimizer.step()


def sets_another_rate(training: Training, x: torch.Tensor, rank: int) -> None:
    training.step(x)
    if rank == 1:
        training.optimizer.param_groups[0]["lr"] = 0.2


def writes_a_parameter(training: Training, x: torch.Tensor, rank: int) -> None:
    training.step(x)
    if rank == 1:
        next(iter(training.model.parameters())).data.add_(0.5)


IN_STEPS: list[Program] = [
    skips_backward,
    returns_early,
    reduces_once_more,
    reduces_before_backward,
    gathers_instead,
    keeps_gradients,
    skips_a_step,
    sets_another_rate,
    writes_a_parameter,
]
IN_LOOPS: list[Program] = [leaves_the_loop, passes_over_a_batch]


@pytest.fixture
def three(mirrored: Callable[[int], rd.MirroredStrategy]) -> rd.MirroredStrategy:
    return mirrored(3)


def batches() -> rd.Dataset:
    return rd.Dataset.range(60).map(lambda number: torch.ones(4) * number / 60).batch(6)


def step_of(training: Training, program: Program) -> Callable[[Any], int]:
    def step(batch: Any) -> int:
        program(training, batch, rd.get_replica_context().replica_id_in_sync_group)
        return 1

    step.__name__ = program.__name__
    return step


def parts(strategy: rd.MirroredStrategy, body: Callable[[], object]) -> str:
    """The message of the error that `body` ends with, which must come soon."""
    begin = time.monotonic()
    with pytest.raises(rd.CollectiveMismatchError) as caught:
        body()
    assert time.monotonic() - begin < _SOON_S
    assert strategy.local_results(strategy.run(lambda: 1)) == (1, 1, 1)  # and it can be used again
    return str(caught.value)


def run_all(strategy: rd.MirroredStrategy, step: Callable[[Any], int], given: Any, options: rd.RunOptions) -> None:
    for x in given:
        strategy.local_results(strategy.run(step, args=(x,), options=options))
    pytest.fail(f"{step} has come to its end")


def build(strategy: rd.MirroredStrategy) -> Training:
    with strategy.scope():
        return Training.build()


def test_steps_that_part_are_errors_that_name_the_replica(three: rd.MirroredStrategy) -> None:
    options = rd.RunOptions(param_sync_every=1)
    for program in IN_STEPS:
        data = iter(three.distribute_dataset(batches()))
        message = parts(three, partial(run_all, three, step_of(build(three), program), data, options))
        # On a busy machine two ranks that wait for each other are found before the third one has come to a collective.
        late = "rank 2 is at work" in message or "rank 2 has ended step" in message
        told = "rank 1 differs from the others" in message or late
        assert told, (program.__name__, message)
        data.close()


def test_loops_that_part_are_errors_that_name_the_replica(three: rd.MirroredStrategy) -> None:
    for program in IN_LOOPS:
        data = iter(three.distribute_dataset(batches()))
        message = parts(three, partial(run_all, three, step_of(build(three), program), [data], rd.RunOptions()))
        assert "rank 1 differs from the others" in message, (program.__name__, message)
        data.close()


def test_a_slow_replica_is_waited_for(three: rd.MirroredStrategy) -> None:
    training = build(three)

    def step(x: torch.Tensor) -> int:
        if rd.get_replica_context().replica_id_in_sync_group == 1:
            time.sleep(2.0)  # several looks of the detector
        training.step(x)
        return 1

    data = iter(three.distribute_dataset(batches()))
    assert three.local_results(three.run(step, args=(next(data),))) == (1, 1, 1)
    data.close()
