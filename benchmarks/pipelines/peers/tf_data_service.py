"""tf.data service: a dispatcher and workers, each a process of this machine. Each worker reads a part of the source.

Splits that the dispatcher deals out one by one (dynamic sharding) would cost a call for every element.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from benchmarks.pipelines.peers import tf_data
from benchmarks.pipelines.scene import MakePass, Pass, Scene

SERVED = (
    "element_map",
    "batch_map",
    "shuffle",
    "mnist_element_map",
    "mnist_batch_map",
    "mnist_input_workers",
    "mnist_tfrecords",
    "jpeg_input_workers",
)

_SERVER = """
import json, sys
import tensorflow as tf
service = tf.data.experimental.service
kind, settings = sys.argv[1], json.loads(sys.argv[2])
if kind == "dispatcher":
    server = service.DispatchServer(service.DispatcherConfig(**settings))
else:
    server = service.WorkerServer(service.WorkerConfig(**settings))
print("started", flush=True)
sys.stdin.read()  # until the process that started this one closes the pipe, or is gone
"""


def free_port() -> int:
    """A port that nobody uses now. The dispatcher has to know its workers' before they start."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
    return port


def start_server(scene: Scene, kind: str, **settings: Any) -> None:
    """A process with a dispatcher or a worker; returns when that is up."""
    command = [sys.executable, "-c", _SERVER, kind, json.dumps(settings)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - the program above
    scene.resources.callback(stop, process)
    if process.stdout is None or not process.stdout.readline():
        raise AssertionError(f"The {kind} of tf.data service must start; its message is in the log.")


def stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def start_service(scene: Scene) -> str:
    """The address of a dispatcher with workers."""
    port, *worker_ports = (free_port() for _ in range(1 + scene.num_workers))
    addresses = [f"localhost:{worker_port}" for worker_port in worker_ports]
    start_server(scene, "dispatcher", port=port, worker_addresses=addresses)
    for worker_port, address in zip(worker_ports, addresses, strict=True):
        start_server(
            scene,
            "worker",
            port=worker_port,
            worker_address=address,
            dispatcher_address=f"localhost:{port}",
            heartbeat_interval_ms=100,
        )
    return f"grpc://localhost:{port}"


def serving(make: Callable[[Scene], Any]) -> MakePass:
    def make_pass(scene: Scene) -> Pass:
        distribute = tf.data.experimental.service.distribute(
            processing_mode=tf.data.experimental.service.ShardingPolicy.HINT, service=start_service(scene)
        )
        return tf_data.reading(make(scene).apply(distribute))

    return make_pass


PASSES: Mapping[str, MakePass] = {name: serving(tf_data.DATASETS[name]) for name in SERVED}
