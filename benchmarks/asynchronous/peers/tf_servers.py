"""TensorFlow's ParameterServerStrategy: chief, workers and servers are processes that speak gRPC, one thread each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from benchmarks.steps.ranks import Ranks
from benchmarks.steps.scene import Run, Scene

END_S = 10.0
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}

Cluster = dict[str, list[str]]


def make_runs(scene: Scene) -> Mapping[str, Run]:
    """A cluster for each workload: a chief that is once connected to one stays so."""
    cluster = cluster_of(scene.ranks, scene.servers)
    for job, addresses in cluster.items():
        for index in range(len(addresses)):
            start(scene.resources, "rank_tf_server", job, str(index), json.dumps(cluster))
    waiting = scene.resources.enter_context(ExitStack())  # closed after the chief's connection
    chief = Ranks(scene, 1)
    start(waiting, "rank_tf_chief", chief.address, json.dumps(cluster), patience_s=END_S)
    chief.accept()
    chief.prepare(scene.workload, scene.folder)
    return {"schedule": chief.run("schedule")}


def cluster_of(num_workers: int, num_servers: int) -> Cluster:
    """Addresses on this machine. The ports were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_workers + num_servers)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    return {"worker": addresses[:num_workers], "ps": addresses[num_workers:]}


def start(stack: ExitStack, module: str, *arguments: str, patience_s: float = 0.0) -> None:
    """A process that ends with the stack: by itself if it is given time for it."""
    command = [sys.executable, "-m", f"benchmarks.asynchronous.peers.{module}", *arguments]
    process = subprocess.Popen(command, env={**os.environ, **_ENVIRONMENT})  # noqa: S603 - the command above
    stack.callback(end, process, patience_s)


def end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    if patience_s:
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    process.kill()
    process.wait()
