"""The loop of a rank of DistributedDataParallel, whoever started it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from benchmarks.steps.models import local_batches, make_step, model_of, sgd
from benchmarks.steps.ranks import Ranks
from benchmarks.steps.scene import Run, Scene, repetitions, timed

Wrap = Callable[[nn.Module, dict[str, Any]], nn.Module]
"""Of a network, and the keyword arguments for DistributedDataParallel."""

SETTINGS: Mapping[str, dict[str, Any]] = {
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"gradient_as_bucket_view": True, "static_graph": True},
}
ALONE = "alone"
"""Each rank computes its share of the steps, and no gradients are exchanged: no way to train is faster."""


def rank_runs(workload: str, folder: str, wrap: Wrap) -> Mapping[str, Run]:
    """The same loop for each of the settings, and one whose ranks know nothing of each other."""
    runs = {name: loop(workload, Path(folder), wrap, settings) for name, settings in SETTINGS.items()}
    return {**runs, ALONE: loop(workload, Path(folder), lambda network, settings: network, {})}


def loop(workload: str, folder: Path, wrap: Wrap, settings: dict[str, Any]) -> Run:
    model = model_of(workload)
    batches = local_batches(folder, dist.get_rank(), dist.get_world_size(), model.global_batch)
    network = wrap(model.make(), settings)
    step = make_step(network, sgd(network))

    def train(count: int) -> None:
        for index in range(count):
            loss = step(batches[index % len(batches)])
        loss.item()

    return lambda count: timed(lambda: train(count))


class BestSetting:
    """A run of all ranks, in the setting that is fastest here: its first call finds out which.

    Args:
        ranks: They have a run for each of `SETTINGS`.
        trial_s: Seconds for each setting.
    """

    def __init__(self, ranks: Ranks, trial_s: float) -> None:
        self._ranks = ranks
        self._trial_s = trial_s
        self._best: Run | None = None

    def __call__(self, count: int) -> float:
        if self._best is None:
            self._best = self._ranks.run(min(SETTINGS, key=self._seconds))
        return self._best(count)

    def _seconds(self, name: str) -> float:
        run = self._ranks.run(name)
        count = repetitions(run, self._trial_s)
        return min(run(count) for _ in range(2)) / count


def step_runs_of(ranks: Ranks, scene: Scene) -> Mapping[str, Run]:
    """What a contender with such ranks makes."""
    ranks.prepare(scene.workload, scene.folder)
    return {"step": BestSetting(ranks, scene.target_s / 4), ALONE: ranks.run(ALONE)}
