"""Checks of the clusters in `deploy/` without a cloud: Ray's own, and the requests of strategies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray._private.accelerators.tpu import TPUAcceleratorManager
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config

from raydist.cluster.nodes import Cluster, Node
from raydist.cluster.resource_check import why_never
from raydist.context.devices import parse_devices
from raydist.options import CommunicationOptions, Timeouts
from raydist.strategies.multi_worker import choose_workers, plan_workers

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
LAUNCHER = [ROOT / "cluster.yaml", DEPLOY / "gcp-gpu.yaml", DEPLOY / "gcp-tpu.yaml"]


def load(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    return config


def test_clusters_pass_the_validation_of_ray_up_and_are_in_the_table() -> None:
    for path in LAUNCHER:
        config = prepare_config(load(path))
        validate_config(config)
        assert config["head_node_type"] in config["available_node_types"], path
        with pytest.raises(jsonschema.ValidationError, match="availble_node_types"):
            validate_config(prepare_config({**load(path), "availble_node_types": {}}))
    table = (DEPLOY / "README.md").read_text()
    assert all(f"]({path.name})" in table for path in DEPLOY.glob("*.yaml"))


def test_gpu_nodes_hold_what_replicas_ask_for() -> None:
    kinds = load(DEPLOY / "gcp-gpu.yaml")["available_node_types"]
    gpus = kinds["gpu-replica"]
    nodes = tuple(Node(str(index), "10.0.0.1", gpus["resources"]) for index in range(gpus["max_workers"]))
    count, devices = choose_workers(nodes, None, None)
    plan = plan_workers(
        "m",
        count,
        devices,
        Cluster(False, nodes),
        resources=None,
        timeouts=Timeouts(),
        communication=CommunicationOptions(),
    )
    assert [device.kind for device in parse_devices(devices, gpus_on_node=1)] == ["GPU"]
    assert why_never(plan.bundles, [node.resources for node in nodes], plan.placement) is None
    assert why_never(plan.bundles, [kinds["cpu-input"]["resources"]] * 9, plan.placement) is not None


def test_a_slice_of_the_launcher_is_two_hosts_of_four_chips() -> None:
    (kind,) = [kind for name, kind in load(DEPLOY / "gcp-tpu.yaml")["available_node_types"].items() if name != "head"]
    accelerator = kind["node_config"]["acceleratorType"]
    assert TPUAcceleratorManager.is_valid_tpu_accelerator_type(accelerator)
    assert accelerator == "v4-16"  # sixteen cores: two a chip
    assert kind["resources"] == {"TPU": 4}
    assert kind["min_workers"] == kind["max_workers"] == 1  # never scaled


def test_kuberay_s_autoscaler_reads_slices_out_of_the_ray_cluster() -> None:
    cluster = load(DEPLOY / "kuberay-tpu.yaml")
    cluster["metadata"]["namespace"] = "default"
    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    tpu = types["tpu-slice"]
    assert (tpu["resources"]["TPU"], tpu["resources"]["TPU-v4-16-head"]) == (4, 1)
    assert (tpu["min_workers"], tpu["max_workers"]) == (0, 2 * 2)  # hosts: two slices of two
    assert types["cpu-input"]["resources"]["CPU"] == 32
    assert why_never([{"TPU": 4.0}] * 2, [tpu["resources"]] * 2, "STRICT_SPREAD") is None


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    dashboard = json.loads((DEPLOY / "raydist_grafana_dashboard.json").read_text())
    expressions = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    asked = {name.removesuffix("_total") for name in re.findall(r"ray_(raydist_\w+)", expressions)}
    source = "".join(path.read_text() for path in (ROOT / "raydist" / "actors").rglob("*.py"))
    made = set(re.findall(r'"(raydist_\w+)"', source))
    made |= {f"raydist_parameter_server_{name}" for name in re.findall(r'^    "(\w+)":', source, flags=re.MULTILINE)}
    assert asked <= made
    assert {"raydist_steps", "raydist_examples", "raydist_input_wait_seconds", "raydist_input_queue_fill"} <= asked
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "SessionName"]
