"""DistributedDataParallel under torchrun, with gloo."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.steps.peers.torch_loop import step_runs_of
from benchmarks.steps.peers.torchrun import launch
from benchmarks.steps.scene import Run, Scene


def make_runs(scene: Scene) -> Mapping[str, Run]:
    return step_runs_of(launch(scene, "rank_ddp"), scene)
