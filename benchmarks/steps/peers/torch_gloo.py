"""All-reduce of torch.distributed's gloo between plain processes under torchrun."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.steps.peers.torchrun import launch
from benchmarks.steps.scene import Run, Scene
from benchmarks.steps.sizes import SIZES


def make_runs(scene: Scene) -> Mapping[str, Run]:
    ranks = launch(scene, "rank_gloo")
    ranks.prepare(scene.workload, scene.folder)
    return {name: ranks.run(name) for name in SIZES}
