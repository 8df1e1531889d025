"""Ray Train's TorchTrainer: two workers of one CPU each, with gloo. And what it takes to get there."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Client
from typing import Any

import ray.train.torch
from ray.train import RunConfig, ScalingConfig
from torch import nn

from benchmarks.steps.peers.local_ray import keep_ray
from benchmarks.steps.peers.torch_loop import SETTINGS, rank_runs, step_runs_of
from benchmarks.steps.ranks import Ranks, serve_rank
from benchmarks.steps.scene import Run, Scene

END_S = 15.0


def wrap(network: nn.Module, settings: dict[str, Any]) -> nn.Module:
    return ray.train.torch.prepare_model(network, parallel_strategy_kwargs=settings)


def serve(config: dict[str, Any]) -> None:
    """A worker's loop: passes on demand."""
    serve_rank(config["address"], lambda workload, folder: rank_runs(workload, folder, wrap))


def first_step(config: dict[str, Any]) -> None:
    """A worker's loop: tells when its first step is done. The clock is the same in all processes of a machine."""
    rank_runs("mlp16", config["folder"], wrap)[next(iter(SETTINGS))](1)
    with Client(config["address"], "AF_UNIX") as connection:
        connection.send(time.perf_counter())


def fit(scene: Scene, storage: str, loop: Callable[[dict[str, Any]], None], address: str) -> threading.Thread:
    trainer = ray.train.torch.TorchTrainer(
        loop,
        train_loop_config={"address": address, "folder": str(scene.folder)},
        scaling_config=ScalingConfig(num_workers=scene.ranks),
        run_config=RunConfig(storage_path=storage),
    )
    thread = threading.Thread(target=trainer.fit, daemon=True)
    thread.start()
    return thread


def make_runs(scene: Scene) -> Mapping[str, Run]:
    keep_ray(scene.ranks)
    storage = scene.resources.enter_context(tempfile.TemporaryDirectory())
    if scene.workload == "start":
        return {"start": lambda count: seconds_to_first_step(scene, storage)}
    waiting = scene.resources.enter_context(ExitStack())  # closed after the ranks' connections
    ranks = Ranks(scene, scene.ranks)
    waiting.callback(fit(scene, storage, serve, ranks.address).join, END_S)
    ranks.accept()
    return step_runs_of(ranks, scene)


def seconds_to_first_step(scene: Scene, storage: str) -> float:
    with ExitStack() as stack:
        ranks = Ranks(Scene("start", scene.folder, resources=stack), scene.ranks)
        start = time.perf_counter()
        thread = fit(scene, storage, first_step, ranks.address)
        ranks.accept()
        seconds = max(ranks.answers()) - start
        thread.join(END_S)
    return seconds
