"""A real autoscaler whose nodes are raylets of this machine: they come when they are needed, and go when they idle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.autoscaling_head import autoscaling_head
from tests.ray_head import ray_home

ROOT = Path(__file__).parent.parent
NODE_TYPES = {
    "train": {"resources": {"CPU": 1, "train": 1, "object_store_memory": 80 * 2**20}, "most": 2},
    "input": {"resources": {"CPU": 1, "input": 1, "object_store_memory": 80 * 2**20}, "most": 2},
}


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(540)
def test_nodes_come_and_go() -> None:
    with ray_home() as home, autoscaling_head(home, NODE_TYPES, max_nodes=2) as head:
        environment = {**home.environment, "RAY_ADDRESS": head.address, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.autoscaling_program"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=520, check=False
        )
    assert done.returncode == 0, done.stderr[-4000:]
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("{")]  # Ray's autoscaler writes there, too
    results = json.loads(told)
    asked = results["ask_for_too_much"]
    assert "The cluster can never hold 1 replicas. Asked: 1 x {'CPU': 16.0}" in asked["error"]
    assert "no node has 16 CPU" in asked["error"]
    assert "no node that its autoscaler may add would change that" in asked["error"]
    assert asked["seconds"] < 45  # and not after Timeouts.start_s
    trained = results["train_on_two_more_nodes"]
    assert trained["weights"] == [[pytest.approx(-0.4)] * 2]
    assert (trained["trained_on"], trained["nodes"], trained["left"]) == (2, 3, 1)
    assert "Waiting for the cluster to place replicas (2 x {'CPU': 1.0, 'train': 1.0}" in done.stderr
    lost = results["lose_a_node"]
    assert lost["weights"] == [[pytest.approx(-0.6)] * 2]
    assert (lost["moved"], lost["ranks"]) == (True, [[1]])
    elastic = results["lose_a_node_of_an_elastic_strategy"]
    assert (elastic["first"], elastic["last"]) == (2, 2)  # nodes; those at the end without the lost one
    assert elastic["changes"] <= 3  # beside the other replica or without it, then on a new node
    assert elastic["weight_differs"] < 1e-6  # each step has moved it by 0.1
    assert (elastic["doubled"], elastic["left"]) == (0, 1)
    assert elastic["absent"] <= 0
    assert results["read_on_nodes_that_come"] == {"read_on": 2, "left": 1}
