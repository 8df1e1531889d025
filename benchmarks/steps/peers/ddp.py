"""DistributedDataParallel under torchrun, with gloo."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.steps.peers.torch_loop import best_setting
from benchmarks.steps.peers.torchrun import launch
from benchmarks.steps.scene import Run, Scene


def make_runs(scene: Scene) -> Mapping[str, Run]:
    return {"step": best_setting(launch(scene, "rank_ddp"), scene)}
