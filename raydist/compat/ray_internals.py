"""Private names of Ray, each with a reason. Other modules of the package use public names only."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import ray
import ray._private.state
import ray._private.worker
from ray._private.accelerators.tpu import VALID_TPU_TOPOLOGY
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS

__all__ = [
    "DEBUG_AUTOSCALING_STATUS",
    "VALID_TPU_TOPOLOGY",
    "copy_of_dataset",
    "free_resources",
    "gcs_client",
    "global_state",
    "global_worker",
    "init_local",
    "living_workers",
    "own_node",
    "without_ray_excepthook",
]

# DEBUG_AUTOSCALING_STATUS: key of the report of Ray's monitor. Without it a strategy cannot see that a request can
# never be met, or that nodes are starting, and waits until its limit.
# VALID_TPU_TOPOLOGY: topologies of each TPU version, for an error that lists them before resources are reserved.


def own_node() -> Any:
    """Return `_global_node`, which each `ray.init` replaces. Without it two Ray sessions cannot be distinguished."""
    return ray._private.worker._global_node


def global_worker() -> Any:
    """Return `global_worker`, which tells if this process is a driver, and which a forked child must not free."""
    return ray._private.worker.global_worker


def gcs_client() -> Any:
    """Return the client of the cluster's key-value store, for group addresses and the autoscaler's report."""
    return global_worker().gcs_client


def global_state() -> Any:
    """Return `state.state`, which knows draining nodes and the resources that the cluster may grow to."""
    return ray._private.state.state


def free_resources() -> dict[str, dict[str, float]]:
    """Call `available_resources_per_node`. Without it messages cannot name the missing resources of each node."""
    found: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    return found


def living_workers() -> Mapping[str, Any]:
    """Call `state.workers`. Without it the guard of a reservation cannot see that the guarded process has died."""
    found: Mapping[str, Any] = ray._private.state.workers()
    return found


def init_local(system_config: Mapping[str, Any], **options: Any) -> None:
    """Start Ray with `_system_config`. Without it the memory of released objects is freed seconds later."""
    ray.init("local", _system_config=dict(system_config), **options)  # "local": never joins a running cluster


def without_ray_excepthook() -> None:
    """Replace `custom_excepthook`, which in a forked child calls the parent's Ray, by `normal_excepthook`."""
    if sys.excepthook is ray._private.worker.custom_excepthook:
        sys.excepthook = ray._private.worker.normal_excepthook


def copy_of_dataset(dataset: Any) -> Any:
    """Copy a Ray dataset with `_deep_copy`, since two iterations over one dataset share its statistics and plan."""
    return dataset.copy(dataset, _deep_copy=True)
