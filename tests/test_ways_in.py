"""The three ways to a cluster: Ray started by the strategy, a Ray that runs already, and a submitted job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.ray_head import RAY, RayHead, ray_home, running_head, running_node

ROOT = Path(__file__).parent.parent
FLAGS = ("--strategy", "mirrored", "--smoke", "--replicas")
EXAMPLE = ("examples/digits_fit.py", *FLAGS)
INTERACTIVE = """
import runpy, sys, ray
ray.init(address="auto")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    spared = ("--no-monitor", "--include-log-monitor=false")  # of nodes to come, and of logs for a driver elsewhere
    with ray_home() as home, running_head(home, flags=spared) as running:
        yield running


def output_of(command: list[str], environment: Mapping[str, str], *, folder: Path = ROOT) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def output_of_job(head: RayHead, *command: str) -> str:
    submit = [str(RAY), "job", "submit", "--address", head.dashboard, "--working-dir", ".", "--", "python", *command]
    return output_of(submit, head.home.environment)


def actors_of(head: RayHead) -> list[dict[str, Any]]:
    """Dead and living ones, as the dashboard lists them."""
    request = urllib.request.Request(
        f"{head.dashboard}/api/v0/actors?limit=1000", headers={"Authorization": f"Bearer {head.home.token}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        listed: list[dict[str, Any]] = json.load(answer)["data"]["result"]["result"]
    return listed


def fingerprint_in(output: str) -> str:
    """The hash of the trained parameters, which the example prints last."""
    assert re.search(r"^test accuracy: 0\.\d{3}$", output, flags=re.MULTILINE), output
    (found,) = re.findall(r"^parameters: (\w{16})$", output, flags=re.MULTILINE)
    return str(found)


def test_a_submitted_job_trains_and_leaves_no_actor_on_the_cluster(head: RayHead) -> None:
    """tests/test_examples.py has a Ray that is started by the strategy."""
    output = output_of_job(head, *EXAMPLE, "1")
    assert re.search(r"^MirroredStrategy: [^,]*$", output, flags=re.MULTILINE), output
    fingerprint_in(output)
    listed = actors_of(head)
    assert any("Replica" in actor["class_name"] for actor in listed)
    assert [actor for actor in listed if actor["state"] != "DEAD"] == []


@pytest.mark.long
def test_all_ways_train_the_same_model(head: RayHead) -> None:
    with ray_home() as home:
        expected = fingerprint_in(output_of([sys.executable, *EXAMPLE, "2"], home.environment))
        assert home.processes_left(within_s=10) == {}
    assert fingerprint_in(output_of_job(head, *EXAMPLE, "2")) == expected
    found = {**head.home.environment, "RAY_ADDRESS": "auto"}
    assert fingerprint_in(output_of([sys.executable, *EXAMPLE, "2"], found)) == expected
    command = [
        sys.executable,
        "-c",
        INTERACTIVE,
        "digits_fit.py",
        *FLAGS,
        "2",
    ]  # as typed in a session started in examples/
    assert fingerprint_in(output_of(command, head.home.environment, folder=ROOT / "examples")) == expected


def wait_for_agent(head: RayHead, within_s: float = 60.0) -> None:
    """Ray refuses jobs until the agent of its head has reported."""
    submit = [str(RAY), "job", "submit", "--address", head.dashboard, "--", "true"]
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        done = subprocess.run(
            submit, env=head.home.environment, capture_output=True, text=True, timeout=60, check=False
        )
        if "No available agent" not in done.stderr + done.stdout:
            return
        time.sleep(1.0)


@pytest.mark.long
def test_two_machines_and_one_job(head: RayHead) -> None:
    """README, "Several machines": a node joins, and a worker is on each of the two."""
    with running_node(head):
        wait_for_agent(head)
        flags = ("--strategy", "multi_worker", "--replicas", "1", "--smoke")
        output = output_of_job(head, "examples/digits_fit.py", *flags)
    (devices,) = re.findall(r"^MultiWorkerMirroredStrategy: (.*)$", output, flags=re.MULTILINE)
    assert len(devices.split(", ")) == 2
    fingerprint_in(output)  # not the same bits: a replica that has a node for itself has more threads
