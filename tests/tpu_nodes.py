"""TPU hosts for tests: raylets of this machine that say they have chips, in the cluster that this process is in."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from raydist.tpu_slices.inventory import SliceShape
from tests.xla_world import IS_REAL, STAND_IN, host_environment

APPEAR_S = 30.0


@contextlib.contextmanager
def tpu_slice(name: str, version: str, topology: str, *, chips: int | None = None) -> Iterator[SliceShape]:
    """The hosts of one slice, labelled as Ray labels them; `chips` on each where that is not the usual number."""
    shape = SliceShape.of(version, topology, chips)
    with tempfile.TemporaryDirectory(prefix="xla-") as folder, contextlib.ExitStack() as stack:
        for worker in range(shape.num_hosts):
            head = {f"TPU-{shape.pod_type}-head": 1.0} if worker == 0 else {}
            labels = {
                "ray.io/tpu-slice-name": name,
                "ray.io/tpu-worker-id": str(worker),
                "ray.io/tpu-topology": topology,
                "ray.io/tpu-pod-type": shape.pod_type,
            }
            variables = host_environment(shape.devices_per_host, folder, worker=worker, hosts=shape.num_hosts)
            resources = {"TPU": float(shape.chips_per_host), **head}
            stack.enter_context(_node(resources, labels, {**variables, "TPU_NAME": name}))
        yield shape


@contextlib.contextmanager
def _node(resources: dict[str, float], labels: dict[str, str], variables: dict[str, str]) -> Iterator[None]:
    import ray
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    settings: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": 0,
        "object_store_memory": 80 * 2**20,
        "min_worker_port": 0,
        "max_worker_port": 0,
        "node_manager_port": 0,
        "include_log_monitor": False,
        "dashboard_agent_listen_port": None,
        "gcs_address": ray.get_runtime_context().gcs_address,
        "resources": resources,
        "labels": labels,
        "env_vars": variables if IS_REAL else {**variables, "PYTHONPATH": str(STAND_IN)},
    }
    before = _living()
    node = Node(RayParams(**settings), head=False, shutdown_at_exit=False, spawn_reaper=False)
    try:
        deadline = time.monotonic() + APPEAR_S
        while _living() == before:
            assert time.monotonic() < deadline, "the node did not appear"
            time.sleep(0.05)
        yield
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=True)
        while _living() > before:
            time.sleep(0.05)


def _living() -> int:
    import ray

    return sum(node["Alive"] for node in ray.nodes())
