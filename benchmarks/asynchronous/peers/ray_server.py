"""The asynchronous parameter server of Ray's documentation: an actor with the weights, workers that take turns.

All travels as objects of the store: the driver waits for whichever worker is ready, has the server apply its gradients,
and gives it the weights that come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.asynchronous.models import Batch, loss_of, make_network, sgd
from benchmarks.asynchronous.sizes import arrays_of, size_of
from benchmarks.steps.peers.local_ray import keep_ray
from benchmarks.steps.scene import Run, Scene, timed

Gradients = list["np.ndarray[Any, Any] | None"]
Weights = dict[str, torch.Tensor]


class ParameterServer:
    """The weights and their optimizer."""

    def __init__(self, workload: str) -> None:
        torch.set_num_threads(1)
        self.network = make_network(workload)
        self.optimizer = sgd(self.network)

    def apply_gradients(self, gradients: Gradients) -> Weights:
        self.optimizer.zero_grad()
        for parameter, gradient in zip(self.network.parameters(), gradients, strict=True):
            parameter.grad = None if gradient is None else torch.from_numpy(gradient)
        self.optimizer.step()
        return self.get_weights()

    def get_weights(self) -> Weights:
        return self.network.state_dict()


class DataWorker:
    """A copy of the network, and data of its own."""

    def __init__(self, workload: str, folder: str) -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        self.network = make_network(workload)
        self.batches = batches_of(workload, Path(folder))

    def compute_gradients(self, weights: Weights) -> Gradients:
        self.network.load_state_dict(weights)
        self.network.zero_grad()
        loss_of(self.network, next(self.batches)).backward()
        return [None if one.grad is None else one.grad.numpy() for one in self.network.parameters()]


def batches_of(workload: str, folder: Path) -> Iterator[Batch]:
    """In memory, for ever."""
    rows = size_of(workload).rows
    inputs, targets = (torch.from_numpy(array) for array in arrays_of(workload, folder))
    while True:
        for at in range(0, len(inputs) - rows + 1, rows):
            yield inputs[at : at + rows], targets[at : at + rows]


def make_runs(scene: Scene) -> Mapping[str, Run]:
    keep_ray(scene.ranks + 1)
    server: Any = ray.remote(ParameterServer).options(num_cpus=1).remote(scene.workload)
    maker = ray.remote(DataWorker).options(num_cpus=1)
    workers: list[Any] = [maker.remote(scene.workload, str(scene.folder)) for _ in range(scene.ranks)]
    for actor in (server, *workers):
        scene.resources.callback(ray.kill, actor)
    ray.get(server.get_weights.remote())
    return {"wait": lambda count: timed(lambda: train(server, workers, count))}


def train(server: Any, workers: list[Any], count: int) -> None:
    weights = server.get_weights.remote()
    under_way = {worker.compute_gradients.remote(weights): worker for worker in workers}
    for _ in range(count):
        (ready, *_), _ = ray.wait(list(under_way))
        worker = under_way.pop(ready)
        weights = server.apply_gradients.remote(ready)
        under_way[worker.compute_gradients.remote(weights)] = worker
    ray.get([weights, *under_way])
