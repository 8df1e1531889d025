"""Options for actors in placement groups, and a guard that removes a placement group when its creator dies."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any, final

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raydist.actors.supervision import kill_actors
from raydist.cluster.reservation import Reservation
from raydist.compat.ray_internals import global_worker, living_workers

_NAMED = ("CPU", "GPU", "memory")  # resources that have their own names in Ray's options


def resource_options(wanted: Mapping[str, float]) -> dict[str, Any]:
    """Return the Ray `options` of an actor with these resources.

    >>> resource_options({"CPU": 1.0, "disk": 2.0})
    {'num_cpus': 1.0, 'num_gpus': 0, 'resources': {'disk': 2.0}}
    """
    others = {key: amount for key, amount in wanted.items() if key not in _NAMED}
    return {"num_cpus": wanted.get("CPU", 0), "num_gpus": wanted.get("GPU", 0), "resources": others}


def bundle_options(reservation: Reservation, bundle: int, wanted: Mapping[str, float], name: str) -> dict[str, Any]:
    """Return the options of an actor in a reserved bundle with these resources. Ray never restarts the actor."""
    return {
        "name": name,
        **resource_options(wanted),
        "memory": wanted.get("memory", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(reservation.group, reservation.bundles[bundle]),
        "max_restarts": 0,
        "max_task_retries": 0,
    }


_LOOK_S = 2.0  # between two checks: a strategy is gone 10 s after its creator


def guard_reservation(reservation: Reservation) -> Any:
    """Start an actor that outlives this process and guards the reservation; return None where none is needed.

    A driver needs none, because Ray removes its placement groups, and neither does a captured group.

    The caller kills the actor when it releases the reservation.
    """
    if global_worker().mode != ray.WORKER_MODE or reservation.is_captured:
        return None
    owner = ray.get_runtime_context().get_worker_id()
    options = {"name": f"raydist-guard-{uuid.uuid4().hex}", "lifetime": "detached", "num_cpus": 0, "max_restarts": 0}
    return ray.remote(ReservationGuard).options(**options).remote(owner, reservation.group)


@final
class ReservationGuard:
    """A guard in a detached actor, which ends itself once the owner is gone and the reservation is removed.

    Args:
        owner: Ray's id of the process that made the reservation.
        group: The reservation.
    """

    def __init__(self, owner: str, group: PlacementGroup) -> None:
        self._owner = owner
        self._group = group
        threading.Thread(target=self._watch, name="raydist-guard", daemon=True).start()

    def _watch(self) -> None:
        while self._owner in living_workers():
            time.sleep(_LOOK_S)
        with contextlib.suppress(Exception):  # the job has ended as well, and Ray removed the group first
            remove_placement_group(self._group)
        kill_actors([ray.get_runtime_context().current_actor])
