"""The cluster of this process: its nodes, its Ray, reservations, jobs, nodes that are drained."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import ray

from raydist.cluster.nodes import (
    Cluster,
    Node,
    _keeping_breakpoints,
    _start,
    address_for,
    connect,
    place,
    release,
    script_folder_for_workers,
    without_drained,
)
from raydist.cluster.ray_session import RaySession, draining_nodes, this_node
from raydist.core.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from tests.ray_head import free_ports, ray_home


def node(name: str, **resources: float) -> Node:
    return Node(name, f"10.0.0.{len(name)}", resources)


def cluster(*nodes: Node) -> Cluster:
    return Cluster(started_here=False, nodes=nodes)


def test_the_best_node_has_gpus_or_is_ones_own_or_the_largest() -> None:
    found = cluster(node("own", CPU=64), node("one", CPU=8, GPU=1), node("four", CPU=8, GPU=4)).best_node()
    assert (found.node_id, found.num_gpus, found.num_cpus) == ("four", 4, 8)
    assert cluster(node("own", CPU=2), node("big", CPU=64)).best_node().node_id == "own"
    on_a_head = cluster(node("own"), node("small", CPU=2), node("big", CPU=64))
    assert on_a_head.best_node().node_id == "big"


def test_what_takes_nothing_is_an_error_before_anything_is_asked_for() -> None:
    nothings: tuple[dict[str, float], ...] = ({"CPU": 0}, {})
    for nothing in nothings:
        with pytest.raises(InvalidArgumentError, match="must take some of a Ray resource"):
            place([{"CPU": 1}, nothing], strategy="PACK", timeout_s=1)


def test_nodes_that_are_drained_get_nothing_new() -> None:
    nodes = (node("own", CPU=2), node("there", CPU=2), node("far", CPU=1))
    assert without_drained(nodes, set()) == nodes
    assert without_drained(nodes, {"there", "gone"}) == (nodes[0], nodes[2])
    left = cluster(*without_drained(nodes, {"own"}))
    assert [each.node_id for each in left.nodes] == ["own", "there", "far"]
    assert left.best_node().node_id == "there"
    assert without_drained(nodes, {"own", "there", "far"}) == nodes


def test_cpu_replicas_share_the_cores_of_a_ray_that_was_started_for_them() -> None:
    assert cluster(node("own", CPU=2)).replica_resources("CPU") == {"CPU": 1.0}
    assert Cluster(started_here=True, nodes=()).replica_resources("CPU")["CPU"] * 1000 <= 1.0


@pytest.mark.ray
def test_joins_the_running_ray_and_gives_reservations_back(ray_cluster: None) -> None:
    joined = connect()
    assert not joined.started_here
    assert [living.num_cpus for living in joined.nodes] == [4]
    assert draining_nodes() == frozenset()
    assert joined.nodes[0].node_id == this_node()
    # A node that was added does not find the driver on its own loopback.
    (here,) = joined.nodes
    assert address_for([here.node_id] * 2, "127.0.0.1") == "127.0.0.1"
    assert address_for([here.node_id, "added"], "127.0.0.1") == here.address
    assert address_for(["added"], "10.0.0.9") == "10.0.0.9"
    for _ in range(2):  # the second one fits only if the first is gone
        release(place([{"CPU": 3.0}], strategy="STRICT_PACK", timeout_s=20))
    with pytest.raises(DeadlineExceededError, match=r"could not place 2 replicas within 0\.2 s.*2 x .*4 CPU"):
        place([{"CPU": 3.0}] * 2, strategy="STRICT_PACK", timeout_s=0.2)


def test_an_address_without_a_ray_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # the session may have one
    with pytest.raises(UnavailableError, match=rf"RAY_ADDRESS='127.0.0.1:{port}' .*unset RAY_ADDRESS"):
        connect()


THREADS = """
import threading, time
import numpy as np
import ray
import raydist as rd
from raydist.cluster.nodes import connect

def in_a_thread(fn):
    thread = threading.Thread(target=fn)
    thread.start()
    thread.join()
    time.sleep(1.5)  # the kernel sends its signals when the thread has ended

def iterate():
    dataset = rd.Dataset.range(30).map(lambda x: x + 1).with_options(rd.Options(num_input_workers=1))
    assert [int(x) for x in dataset] == list(range(1, 31))

def train():
    with rd.MirroredStrategy(1) as strategy:
        dataset = strategy.distribute_dataset(rd.Dataset.range(8).batch(4))
        found = [int(strategy.run(lambda x: x.sum(), args=(batch,))) for batch in dataset]
        assert found == [6, 22], found

for use in (iterate, train):
    in_a_thread(use)
train()
print("lasted", flush=True)
ray.shutdown()
deadline = time.monotonic() + 5
while any(thread.name == "raydist-keeps-ray" for thread in threading.enumerate()):
    assert time.monotonic() < deadline, "the thread outlives its Ray"
    time.sleep(0.1)

in_a_thread(lambda: ray.init(include_dashboard=False, logging_level="ERROR"))
began = time.monotonic()
try:
    connect()
except rd.UnavailableError as error:
    print("told:", error, time.monotonic() - began < 5, flush=True)
ray.shutdown()
print("done", flush=True)
"""


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(150)
def test_ray_lasts_when_the_thread_that_needed_it_first_ends() -> None:
    with ray_home() as home:
        printed = home.run(THREADS)
    lasted, told, end = printed.strip().splitlines()
    assert (lasted, end) == ("lasted", "done")
    assert re.match(r"told: .*raylet.*thread that has ended since.*ray\.shutdown\(\).* True", told)


def test_breakpoints_of_this_process_stay_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has them ask for a package that is not there, and go on without a word to the program."""
    for before in (None, "mine.set_trace"):
        monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
        monkeypatch.delenv("RAY_DEBUG", raising=False)
        if before is not None:
            monkeypatch.setenv("PYTHONBREAKPOINT", before)
        with contextlib.suppress(ConnectionError), _keeping_breakpoints():
            monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb._driver_set_trace")
            raise ConnectionError("nobody answers at this address")
        assert os.environ.get("PYTHONBREAKPOINT") == before


class AnyNode:
    """Every ray.init makes one."""


def test_a_session_ends_with_its_ray_and_another_ray_is_another_session(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = [True]
    first, second = AnyNode(), AnyNode()
    monkeypatch.setattr(ray, "is_initialized", lambda: connected[0])
    monkeypatch.setattr(ray._private.worker, "_global_node", first)
    session = RaySession()
    assert session.is_open
    session.require("This pool")
    monkeypatch.setattr(ray._private.worker, "_global_node", second)
    assert not session.is_open
    message = r"This pool needs the Ray .* shut down \(ray\.shutdown\(\)\)"
    with pytest.raises(UnavailableError, match=message) as caught:
        session.require("This pool")
    assert caught.value.actor == "This pool"
    monkeypatch.setattr(ray._private.worker, "_global_node", first)
    assert session.is_open
    connected[0] = False
    assert not session.is_open


FOLDER = "/tmp/package/examples"
SCRIPT = f"{FOLDER}/train.py"


def in_job(runtime_env: dict[str, Any] | None) -> dict[str, str]:
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": runtime_env})}


def test_the_script_folder_reaches_workers_of_a_job_with_a_working_directory_and_no_others() -> None:
    job = in_job({"working_dir": "gcs://a.zip", "env_vars": {"DEBUG": "1"}})
    assert script_folder_for_workers(job, SCRIPT, ["/lib", FOLDER]) == {"PYTHONPATH": FOLDER}
    for environ, sys_path in (
        ({}, [FOLDER]),  # no job
        (in_job(None), [FOLDER]),  # a job without environment
        (in_job({"pip": ["x"]}), [FOLDER]),  # a job without working directory
        (in_job({"working_dir": "gcs://a.zip"}), ["/lib"]),  # python -m
        (in_job({"working_dir": "gcs://a.zip", "env_vars": {"PYTHONPATH": "/mine"}}), [FOLDER]),  # the user has set it
    ):
        assert script_folder_for_workers(environ, SCRIPT, sys_path) == {}, environ


def test_without_ray_nothing_is_drained_and_nothing_started() -> None:
    program = (
        "import ray; from raydist.cluster.ray_session import *\n"
        "print([*draining_nodes()], this_node(), ray.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]  False\n"


def test_a_ray_that_starts_too_slowly_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [Exception("The current node timed out during startup. The GCS may be overloaded.")]
    started: list[Any] = []

    def init_local(*_: Any, **__: Any) -> None:
        if errors:
            raise errors.pop()
        started.append(1)

    monkeypatch.setattr("raydist.cluster.nodes.init_local", init_local)
    monkeypatch.setattr("raydist.cluster.nodes.ray.shutdown", lambda: None)
    _start()
    assert started == [1]
    errors += [Exception("The current node timed out during startup.")] * 2
    with pytest.raises(DeadlineExceededError, match="must start within the 30 s.*Try again"):
        _start()
