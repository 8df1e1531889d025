"""raydist: what slow workers leave of synchronous, asynchronous and half-synchronous training. Compute is simulated.

A repetition is one batch that was applied: of a synchronous step as many as there are replicas, of gradients that came
too late none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import raydist as rd
from benchmarks.asynchronous.simulated import Counter, Slowness, each_is_slow_at_times, make_step, one_is_slow
from benchmarks.steps.scene import Run, Scene, timed

BACKUPS, STALENESS = 1, 4
ROWS = 8


def make_runs(scene: Scene) -> Mapping[str, Run]:
    runs = {"synchronous": synchronous(scene), "async": asynchronous(scene, "async")}
    if scene.workload == "one_slow":
        return {**runs, "backups": asynchronous(scene, rd.SyncWithBackups(BACKUPS), of_step=scene.ranks - BACKUPS)}
    return {**runs, "bounded": asynchronous(scene, rd.BoundedStaleness(STALENESS))}


def slowness_of(scene: Scene) -> Slowness:
    if scene.workload == "at_times":
        return each_is_slow_at_times
    folder = scene.resources.enter_context(tempfile.TemporaryDirectory())
    return one_is_slow(str(Path(folder) / "slow"))


def synchronous(scene: Scene) -> Run:
    """Batches of all replicas, exchanged before the next one."""
    strategy = scene.resources.enter_context(rd.MirroredStrategy(scene.ranks))
    with strategy.scope():
        counter = Counter()
        step = make_step(counter, slowness_of(scene))
    rows = iter(strategy.distribute_dataset(ones(scene.ranks * ROWS)))

    def train(count: int) -> None:
        for _ in range(-(-count // scene.ranks)):
            strategy.run(step, args=(next(rows),))
        assert counter.updates()  # waits for them

    return per_batch(counter, train, scene.ranks)


def asynchronous(scene: Scene, consistency: Any, of_step: int = 1) -> Run:
    """Batches of single workers.

    Args:
        scene: Where.
        consistency: Of reads and pushes.
        of_step: Batches of one update.
    """
    strategy = rd.ParameterServerStrategy(scene.ranks, scene.servers, consistency=consistency)
    scene.resources.enter_context(strategy)
    coordinator = rd.ClusterCoordinator(strategy)
    with strategy.scope():
        counter = Counter()
        step = make_step(counter, slowness_of(scene))
    rows = iter(coordinator.create_per_worker_dataset(ones(ROWS)))

    def closure(drawn: Any) -> None:
        step(next(drawn))

    def train(count: int) -> None:
        for _ in range(count):
            coordinator.schedule(closure, args=(rows,))
        coordinator.join()

    return per_batch(counter, train, of_step)


def ones(batch_size: int) -> rd.Dataset:
    return rd.Dataset.from_tensors(torch.ones((), dtype=torch.float64)).repeat().batch(batch_size)


def per_batch(counter: Counter, train: Callable[[int], None], of_step: int) -> Run:
    """Seconds of so many batches, at the rate at which they are applied."""

    def run(count: int) -> float:
        before = counter.updates()
        seconds = timed(lambda: train(count))
        return seconds * count / max(1, of_step * (counter.updates() - before))

    return run
