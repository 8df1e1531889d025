"""raydist: two replicas, with the input pipeline inside the clock. And what it takes to get there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import torch

import raydist as rd
from benchmarks.steps.models import MODELS, Batch, Model, load_images, make_step, model_of, sgd
from benchmarks.steps.scene import Run, Scene, timed

Step = Callable[[Batch], torch.Tensor]
Inside = Callable[[Iterator[Batch], int], torch.Tensor]
"""What a replica does in one call: draw from an iterator so many times."""


def images(scene: Scene, model: Model) -> rd.Dataset:
    return rd.Dataset.from_tensor_slices(load_images(scene.folder)).repeat().batch(model.global_batch)


def make_runs(scene: Scene) -> Mapping[str, Run]:
    return start_runs(scene) if scene.workload == "start" else step_runs(scene)


def same(step: Step) -> Inside:
    """No input."""

    def train(batches: Iterator[Batch], count: int) -> torch.Tensor:
        batch = next(batches)
        for _ in range(count):
            loss = step(batch)
        return loss

    return train


def loop(step: Step) -> Inside:
    """The whole thing."""

    def train(batches: Iterator[Batch], count: int) -> torch.Tensor:
        for _ in range(count):
            loss = step(next(batches))
        return loss

    return train


def draw(step: Step) -> Inside:
    """Input alone."""

    def read(batches: Iterator[Batch], count: int) -> torch.Tensor:
        for _ in range(count):
            batch = next(batches)
        return batch[1].sum()

    return read


def inside(strategy: rd.Strategy, fn: Inside, batches: Iterator[Batch]) -> Run:
    """One call of `run` for all of a pass."""
    return lambda count: timed(lambda: strategy.local_results(strategy.run(fn, args=(batches, count))))


def outside(strategy: rd.Strategy, step: Step, batches: Iterator[Batch], *, read: bool) -> Run:
    """One call of `run` for every step."""

    def train(count: int) -> None:
        for _ in range(count):
            loss = strategy.run(step, args=(next(batches),))
            if read:
                strategy.local_results(loss)
        strategy.local_results(loss)  # waits for the last step

    return lambda count: timed(lambda: train(count))


def step_runs(scene: Scene) -> Mapping[str, Run]:
    return runs_of(scene, rd.MirroredStrategy(scene.ranks))


def runs_of(scene: Scene, strategy: rd.Strategy) -> Mapping[str, Run]:
    """All ways to train on a strategy, which is closed with the scene."""
    model = model_of(scene.workload)
    scene.resources.enter_context(strategy)
    with strategy.scope():
        network = model.make()
        step = make_step(network, sgd(network))
    view = strategy.distribute_dataset(images(scene, model))
    ways = {"same": same, "loop": loop, "draw": draw}
    return {
        **{name: inside(strategy, way(step), iter(view)) for name, way in ways.items()},
        "run": outside(strategy, step, iter(view), read=False),
        "read": outside(strategy, step, iter(view), read=True),
    }


def seconds_to_first_step(scene: Scene) -> float:
    """From making a strategy to the loss of its first step on an input pipeline; ends all of it then."""
    model = MODELS["mlp16"]
    start = time.perf_counter()
    with rd.MirroredStrategy(scene.ranks) as strategy:
        with strategy.scope():
            network = model.make()
            step = make_step(network, sgd(network))
        batches = iter(strategy.distribute_dataset(images(scene, model)))
        strategy.local_results(strategy.run(step, args=(next(batches),)))
        return time.perf_counter() - start


def start_runs(scene: Scene) -> Mapping[str, Run]:
    """Ray is up before the first one."""
    with rd.MirroredStrategy(scene.ranks) as strategy:
        assert strategy.worker_devices  # asking for them starts Ray
    return {"start": lambda count: seconds_to_first_step(scene)}
