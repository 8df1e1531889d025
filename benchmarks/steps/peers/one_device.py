"""OneDeviceStrategy beside a bare loop over the same dataset: CPU seconds of this process outside of the steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import raydist as rd
from benchmarks.steps.models import load_images
from benchmarks.steps.scene import Run, Scene

STEPS_MS = (0.5, 5.0)
SIDE = 128
ROWS = 8
"""Few: what a strategy adds to a step doesn't depend on them, and copying rows costs more than that."""


def small_batches(scene: Scene) -> rd.Dataset:
    return rd.Dataset.from_tensor_slices(load_images(scene.folder)).repeat().batch(ROWS)


class Work:
    """Matrix products of about so many milliseconds on this thread; adds up the CPU time that they took."""

    def __init__(self, milliseconds: float) -> None:
        self.seconds = 0.0
        self._matrix = torch.rand(SIDE, SIDE)
        self._count = 1
        self._count = max(1, round(milliseconds / (1000 * min(self._once() for _ in range(200)))))

    def __call__(self, batch: Any) -> torch.Tensor:
        self.seconds += self._once()
        loss: torch.Tensor = batch[0][0, 0, 0, 0]
        return loss

    def _once(self) -> float:
        start = time.thread_time()
        for _ in range(self._count):
            torch.mm(self._matrix, self._matrix)
        return time.thread_time() - start


def outside_of(work: Work, loop: Callable[[int], None]) -> Run:
    """A run whose seconds are CPU time of the process, all threads together, without the work itself."""

    def run(count: int) -> float:
        start, inside = time.process_time(), work.seconds
        loop(count)
        return time.process_time() - start - (work.seconds - inside)

    return run


def bare(scene: Scene, milliseconds: float) -> Run:
    work, batches = Work(milliseconds), iter(small_batches(scene))

    def loop(count: int) -> None:
        for _ in range(count):
            work(next(batches))

    return outside_of(work, loop)


def strategic(scene: Scene, milliseconds: float) -> Run:
    strategy = scene.resources.enter_context(rd.OneDeviceStrategy("cpu"))
    batches = iter(strategy.distribute_dataset(small_batches(scene)))
    work = Work(milliseconds)

    def loop(count: int) -> None:
        for _ in range(count):
            strategy.run(work, args=(next(batches),))

    return outside_of(work, loop)


def make_runs(scene: Scene) -> Mapping[str, Run]:
    torch.set_num_threads(1)
    made = {f"bare {step:g} ms": bare(scene, step) for step in STEPS_MS}
    return {**made, **{f"strategy {step:g} ms": strategic(scene, step) for step in STEPS_MS}}
