"""raydist: from no Ray at all to the first step of two replicas."""

from __future__ import annotations

from collections.abc import Mapping

import ray

from benchmarks.steps.peers.raydist_replicas import seconds_to_first_step
from benchmarks.steps.scene import Run, Scene


def make_runs(scene: Scene) -> Mapping[str, Run]:
    def start(count: int) -> float:
        seconds = seconds_to_first_step(scene)
        ray.shutdown()
        return seconds

    return {"start": start}
