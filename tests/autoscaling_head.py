"""An autoscaling cluster of a test's own: Ray's fake multi-node provider, which starts raylets on this machine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE
from ray.util import get_node_ip_address

from tests.ray_head import RayHead, RayHome, free_ports, running_head

HEAD_CPUS = 1
IDLE_S = 3.0  # how long a node without work stays


@contextlib.contextmanager
def autoscaling_head(home: RayHome, node_types: Mapping[str, Mapping[str, Any]], max_nodes: int) -> Iterator[RayHead]:
    """A head node whose autoscaler (version 2, as `ray up` starts it) adds and removes nodes of these types."""
    (port,) = free_ports(1)
    address = f"{get_node_ip_address()}:{port}"
    config = home.folder / "autoscaling.json"
    config.write_text(json.dumps(_config(address, node_types, max_nodes)))
    environment = {
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    flags = [f"--autoscaling-config={config}", f"--num-cpus={HEAD_CPUS}"]
    with running_head(home, port=port, flags=flags, environment=environment) as head:
        yield head


def _config(address: str, node_types: Mapping[str, Mapping[str, Any]], max_nodes: int) -> dict[str, Any]:
    workers = {
        name: {"node_config": {}, "min_workers": 0, "max_workers": kind["most"], "resources": dict(kind["resources"])}
        for name, kind in node_types.items()
    }
    head = {"node_config": {}, "max_workers": 0, "resources": {"CPU": HEAD_CPUS}}
    lists = ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands")
    commands = ("head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
    return {
        "cluster_name": "raydist-test",
        "max_workers": max_nodes,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "provider": {
            "type": "external",  # by its own name it reads a file that the wheel leaves out
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": address,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {FAKE_HEAD_NODE_TYPE: head, **workers},
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        **{name: [] for name in lists + commands},
    }
