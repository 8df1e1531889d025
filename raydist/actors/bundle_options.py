"""How Ray is to start an actor in its place of a reservation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

__all__ = ["bundle_options", "resource_options"]

_NAMED = ("CPU", "GPU", "memory")  # resources that Ray's options have names of their own for


def resource_options(wanted: Mapping[str, float]) -> dict[str, Any]:
    """What an actor takes, as `options` of Ray.

    >>> resource_options({"CPU": 1.0, "disk": 2.0})
    {'num_cpus': 1.0, 'num_gpus': 0, 'resources': {'disk': 2.0}}
    """
    others = {key: amount for key, amount in wanted.items() if key not in _NAMED}
    return {"num_cpus": wanted.get("CPU", 0), "num_gpus": wanted.get("GPU", 0), "resources": others}


def bundle_options(group: PlacementGroup, bundle: int, wanted: Mapping[str, float], name: str) -> dict[str, Any]:
    """Options of an actor of this name in a bundle, of which it takes what is wanted. Ray never starts it again."""
    return {
        "name": name,
        **resource_options(wanted),
        "memory": wanted.get("memory", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
        "max_restarts": 0,
        "max_task_retries": 0,
    }
