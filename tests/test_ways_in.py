"""The three ways to a cluster: Ray started by the strategy, a Ray that runs already, and a submitted job."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.ray_head import RAY, RayHead, RayHome, ray_home, running_head, running_node
from tests.shared_files import left_behind, shared_files

ROOT = Path(__file__).parent.parent
FLAGS = ("--strategy", "mirrored", "--replicas", "2", "--smoke")
EXAMPLE = ("examples/digits_fit.py", *FLAGS)
INTERACTIVE = """
import runpy, sys, ray
ray.init(address="auto")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LIST_ACTORS = """
import ray
from ray._private.state import state
ray.init()
print(sum(actor["State"] != "DEAD" and "raydist" in str(actor) for actor in state.actor_table(None).values()))
"""

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_home() as home, running_head(home) as running:
        yield running


def output_of(command: list[str], environment: Mapping[str, str], *, folder: Path = ROOT) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fingerprint_in(output: str) -> str:
    """The hash of the trained parameters, which the example prints last."""
    assert re.search(r"^test accuracy: 0\.\d{3}$", output, flags=re.MULTILINE), output
    (found,) = re.findall(r"^parameters: (\w+)$", output, flags=re.MULTILINE)
    return str(found)


def processes_left(home: RayHome, within_s: float) -> dict[int, str]:
    deadline = time.monotonic() + within_s
    while (left := home.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.fixture(scope="module")
def expected_fingerprint() -> str:
    """The fingerprint of the run with a Ray of its own; nothing of that Ray may outlive the run."""
    files = shared_files()
    with ray_home() as home:
        output = output_of([sys.executable, *EXAMPLE], home.environment)
        assert processes_left(home, within_s=10) == {}
    assert not left_behind(files)
    return fingerprint_in(output)


def test_ray_started_by_the_strategy(expected_fingerprint: str) -> None:
    assert len(expected_fingerprint) == 16


def test_running_cluster_found_by_ray_address(head: RayHead, expected_fingerprint: str) -> None:
    environment = {**head.home.environment, "RAY_ADDRESS": "auto"}
    assert fingerprint_in(output_of([sys.executable, *EXAMPLE], environment)) == expected_fingerprint
    assert output_of([sys.executable, "-c", LIST_ACTORS], environment).split() == ["0"]


@pytest.mark.long
def test_running_cluster_joined_interactively(head: RayHead, expected_fingerprint: str) -> None:
    command = [sys.executable, "-c", INTERACTIVE, "digits_fit.py", *FLAGS]  # as typed in a session started in examples/
    output = output_of(command, head.home.environment, folder=ROOT / "examples")
    assert fingerprint_in(output) == expected_fingerprint


def test_submitted_job(head: RayHead, expected_fingerprint: str) -> None:
    submit = [str(RAY), "job", "submit", "--address", head.dashboard, "--working-dir", ".", "--", "python", *EXAMPLE]
    assert fingerprint_in(output_of(submit, head.home.environment)) == expected_fingerprint


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


def test_two_machines_and_one_job(head: RayHead) -> None:
    """README, "Several machines": a node joins, and a worker is on each of the two."""
    submit = [str(RAY), "job", "submit", "--address", head.dashboard, "--working-dir", ".", "--", "python"]
    flags = ("--strategy", "multi_worker", "--replicas", "1", "--smoke")
    with running_node(head):
        wait_for_agent(head)
        output = output_of([*submit, "examples/digits_fit.py", *flags], head.home.environment)
    (devices,) = re.findall(r"^MultiWorkerMirroredStrategy: (.*)$", output, flags=re.MULTILINE)
    assert len(devices.split(", ")) == 2
    # Not the same bits: a replica that has a node for itself has more threads.
    assert len(fingerprint_in(output)) == 16
