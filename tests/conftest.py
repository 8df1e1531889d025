"""What every test shares: one local Ray cluster a session, leak checks around each test, hypothesis profiles."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Before torch is imported, here and in every process that a test starts: many small processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LEAK_GRACE_S = 10.0
"""How long what a test closed may take to be gone (I7 allows 10 s)."""

# Threads that libraries start once and keep: Ray's log and error listeners, its client connections, torch's pools,
# fsspec's event loop. PythonGCThread is Ray's too: it starts when the object store asks for a garbage collection. None
# of these may begin the name of a thread of ours (raydist-...).
LIBRARY_THREADS = (
    *("ray_", "Ray", "pytest_timeout", "grpc", "asyncio", "pydevd", "Thread-auto", "tqdm", "opentelemetry"),
    *("fsspecIO", "PythonGCThread"),
)
LIBRARY_ACTORS = ("_StatsActor", "_AutoscalingCoordinatorActor")  # Ray Data's own, which live as long as the cluster
LIBRARY_VARIABLES = ("RAY_", "PYTEST_", "KMP_", "TORCH_", "TORCHINDUCTOR_", "CUDA_", "TRITON_", "GRPC_")

hypothesis.settings.register_profile("dev", max_examples=25, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray with 4 CPUs, started by the first test that asks for it and shared by all of them."""
    import ray

    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=500 * 2**20,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()


def _foreign_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(LIBRARY_THREADS)}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(LIBRARY_VARIABLES)}


def _shared_memory_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*raydist*")}


def live_actors() -> set[str]:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return set()
    from ray._private.state import state

    table: dict[str, Any] = state.actor_table(None)
    alive = {key: actor["ActorClassName"] for key, actor in table.items() if actor["State"] != "DEAD"}
    return {f"{name} {key}" for key, name in alive.items() if name not in LIBRARY_ACTORS}


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
def _no_leaks(shared_actors: set[str], shared_threads: set[threading.Thread]) -> Iterator[None]:
    """Fail a test that leaves threads, actors, shared memory, environment variables or a process group behind."""
    probes: dict[str, Callable[[], set[Any]]] = {
        "threads": lambda: _foreign_threads() - shared_threads,
        "shared-memory files": _shared_memory_files,
        "actors": lambda: live_actors() - shared_actors,
        "process groups": _process_group,
    }
    before = {name: probe() for name, probe in probes.items()}
    environment = _environment()
    yield
    for name, probe in probes.items():
        left = _wait_until_gone(probe, before[name])
        assert not left, f"The test left {name} behind after {LEAK_GRACE_S} s: {left}"
    assert _environment() == environment, "The test changed environment variables; use monkeypatch.setenv."


def _wait_until_gone(probe: Callable[[], set[Any]], before: set[Any]) -> set[Any]:
    deadline = time.monotonic() + LEAK_GRACE_S
    while (left := probe() - before) and time.monotonic() < deadline:
        gc.collect()  # an exception that a test has caught holds the test's variables, and these hold the exception
        time.sleep(0.05)
    return left
