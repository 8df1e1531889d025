"""Shared by all tests: one local Ray cluster a session, leak checks around each test, hypothesis profiles."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

from tests.shared_files import shared_files, used_by_others

# Before torch is imported, here and in every process that a test starts: many small processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Bytecode is kept whatever the shell says: hundreds of processes import what each of them would compile anew, which is
# 0.6 of the 2.6 s that a replica takes, and more than half of the time in which pytest collects the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Ray gives its workers niceness 15: they starve, for minutes, beside another process of the tests that computes.
os.environ.setdefault("RAY_worker_niceness", "0")

LEAK_GRACE_S = 10.0
"""Seconds until everything that a test closed must be gone (I7 allows 10 s)."""

# Threads that libraries start once and keep: Ray's log and error listeners, its client connections, torch's pools,
# fsspec's event loop. PythonGCThread is Ray's too: it starts when the object store asks for a garbage collection; Dummy
# is how Python names one that another language began. None of these may begin the name of a thread of ours
# (raydist-...).
LIBRARY_THREADS = (
    *("ray_", "Ray", "pytest_timeout", "grpc", "asyncio", "pydevd", "Thread-auto", "tqdm", "opentelemetry"),
    *("fsspecIO", "PythonGCThread", "Dummy", "wandb-", "Otel"),
    "raydist-rendezvous",  # overtaken in torch's lookup of a name, which takes 5 s or more and cannot be interrupted
)
LIBRARY_ACTORS = ("_StatsActor", "_AutoscalingCoordinatorActor")  # Ray Data's own, which live as long as the cluster
LIVING = ("RESTARTING", "DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING")
"""States of actors in an order in which none that goes from one to the next is missed."""
LIBRARY_VARIABLES = (
    *("RAY_", "PYTEST_", "KMP_", "TORCH_", "TORCHINDUCTOR_", "CUDA_", "TRITON_", "GRPC_"),
    *("CRC32C_SW_MODE", "_MLFLOW_", "WANDB_", "PYTHONBREAKPOINT"),  # tensorboardX's, mlflow's, wandb's, Ray's
    *("TPU_", "PJRT_", "XLA_", "CPU_NUM_DEVICES", "TF_CPP_"),  # torch_xla's, for as long as tests of a folder use it
)

# The first text that hypothesis draws in a new checkout takes 40 s of a busy machine: it makes tables of Unicode.
hypothesis.settings.register_profile("any", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("dev", hypothesis.settings.get_profile("any"), max_examples=25)
hypothesis.settings.register_profile(
    "ci", hypothesis.settings.get_profile("any"), max_examples=50, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray with 4 CPUs, started by the first test that asks for it and shared by all of them."""
    import ray

    ray.init(
        "local",  # whatever else runs on this machine
        num_cpus=4,
        resources={"session": 1000},  # what is shared asks for it, so that no node which a test adds gets hold of it
        include_dashboard=False,
        object_store_memory=500 * 2**20,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """If several processes run the tests, give each cluster of the session to one of them."""
    from tests.scheduling import ClusterScheduling

    return ClusterScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the tests that take longest; leave those that take too long to `make test-long`."""
    if "RAYDIST_LONG" not in os.environ:
        too_long = [item for item in items if item.get_closest_marker("long")]
        for item in too_long:
            items.remove(item)
        config.hook.pytest_deselected(items=too_long)
    items.sort(key=lambda item: "ray_cluster" not in getattr(item, "fixturenames", ()))


def _foreign_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(LIBRARY_THREADS)}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(LIBRARY_VARIABLES)}


def live_actors() -> set[str]:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return set()
    from ray._private.state import state

    found: dict[str, str] = {}
    for kind in LIVING:  # not all at once: the dead ones are hundreds, and reading these took 20 ms a test
        table: dict[str, Any] = state.actor_table(None, actor_state_name=kind)
        found.update({key: actor["ActorClassName"] for key, actor in table.items()})
    return {f"{name} {key}" for key, name in found.items() if name not in LIBRARY_ACTORS}


def _process_group() -> set[str]:
    distributed = sys.modules.get("torch.distributed")
    return {"default"} if distributed is not None and distributed.is_initialized() else set()


@pytest.fixture(scope="session")
def shared_actors() -> set[str]:
    """Actors that a session's fixture keeps for several tests; it adds them with `live_actors`."""
    return set()


@pytest.fixture(scope="session")
def shared_threads() -> set[threading.Thread]:
    """Threads of ours that a session's fixture keeps for several tests."""
    return set()


@pytest.fixture(autouse=True)
def _no_leaks(
    request: pytest.FixtureRequest, shared_actors: set[str], shared_threads: set[threading.Thread]
) -> Iterator[None]:
    """Fail a test that leaves threads, actors, shared memory, environment variables or a process group behind."""
    probes: dict[str, Callable[[], set[Any]]] = {
        "threads": lambda: _foreign_threads() - shared_threads,
        "shared-memory files": shared_files,
        "process groups": _process_group,
    }
    # Asking Ray takes 30 ms, for which thousands of tests have no use.
    if request.node.get_closest_marker("ray") or "ray_cluster" in request.fixturenames:
        probes["actors"] = lambda: live_actors() - shared_actors
    before = {name: probe() for name, probe in probes.items()}
    environment = _environment()
    yield
    for name, probe in probes.items():
        left = _wait_until_gone(probe, before[name])
        left -= used_by_others(left)
        assert not left, f"The test left {name} behind after {LEAK_GRACE_S} s: {left}"
    assert _environment() == environment, "The test changed environment variables; use monkeypatch.setenv."


def _wait_until_gone(probe: Callable[[], set[Any]], before: set[Any]) -> set[Any]:
    deadline = time.monotonic() + LEAK_GRACE_S
    left = probe() - before
    while left and time.monotonic() < deadline:
        gc.collect()  # an exception that a test has caught holds the test's variables, and these hold the exception
        time.sleep(0.05)
        left &= probe()  # not what came meanwhile: tests in other processes have files, too, for a moment each
    return left
