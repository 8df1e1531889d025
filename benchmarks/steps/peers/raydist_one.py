"""raydist: one replica with two threads, in this process."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import raydist as rd
from benchmarks.steps.models import MODELS, make_step, sgd
from benchmarks.steps.peers.raydist_replicas import images
from benchmarks.steps.scene import Run, Scene, timed


def make_runs(scene: Scene) -> Mapping[str, Run]:
    model = MODELS[scene.workload]
    torch.set_num_threads(scene.ranks)
    strategy = scene.resources.enter_context(rd.OneDeviceStrategy("cpu"))
    with strategy.scope():
        network = model.make()
        step = make_step(network, sgd(network))
    batches = iter(strategy.distribute_dataset(images(scene, model)))

    def train(count: int) -> None:
        for _ in range(count):
            strategy.run(step, args=(next(batches),))

    return {"run": lambda count: timed(lambda: train(count))}
