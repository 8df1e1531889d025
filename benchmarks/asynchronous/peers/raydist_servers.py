"""raydist: workers and parameter servers. Input comes from a dataset of each worker, or from a distributed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import raydist as rd
from benchmarks.asynchronous.models import Batch, make_network, make_step, sgd
from benchmarks.asynchronous.sizes import arrays_of, size_of
from benchmarks.steps.scene import Run, Scene, timed

Step = Callable[[Batch], torch.Tensor]


def make_runs(scene: Scene) -> Mapping[str, Run]:
    strategy = rd.ParameterServerStrategy(scene.ranks, scene.servers)
    scene.resources.enter_context(strategy)
    coordinator = rd.ClusterCoordinator(strategy)
    with strategy.scope():
        network = make_network(scene.workload)
        step = make_step(network, sgd(network))
    rows = rd.Dataset.from_tensor_slices(arrays_of(scene.workload, scene.folder)).repeat()
    batches = rows.batch(size_of(scene.workload).rows, drop_remainder=True)
    return {
        "schedule": scheduled(coordinator, step, iter(coordinator.create_per_worker_dataset(batches))),
        "run": driven(strategy, coordinator, step, iter(strategy.distribute_dataset(batches))),
    }


def scheduled(coordinator: rd.ClusterCoordinator, step: Step, batches: Iterator[Batch]) -> Run:
    """All closures at once; each draws from its worker's dataset."""

    def closure(drawn: Iterator[Batch]) -> torch.Tensor:
        return step(next(drawn))

    def train(count: int) -> None:
        for _ in range(count):
            loss = coordinator.schedule(closure, args=(batches,))
        coordinator.join()
        check(coordinator.fetch(loss))

    return lambda count: timed(lambda: train(count))


def driven(strategy: rd.Strategy, coordinator: rd.ClusterCoordinator, step: Step, batches: Iterator[Batch]) -> Run:
    """A call of `run` for every batch, which goes to the next free worker."""

    def train(count: int) -> None:
        for _ in range(count):
            loss = strategy.run(step, args=(next(batches),))
        coordinator.join()
        check(coordinator.fetch(loss))

    return lambda count: timed(lambda: train(count))


def check(loss: Any) -> None:
    if not torch.as_tensor(loss).isfinite():
        raise ArithmeticError(f"the loss became {loss}")
