"""Giving a reservation back when the actor or task that made it dies: Ray itself does so when the whole job ends."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from typing import Any, final

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raydist.actors.supervision import kill_actors

__all__ = ["ReservationGuard", "guard_reservation"]

_LOOK_S = 2.0  # between two looks: a strategy is gone 10 s after what made it


def guard_reservation(group: PlacementGroup) -> Any:
    """An actor that outlives this process, to be killed by who gives the reservation back; None in a driver."""
    if ray._private.worker.global_worker.mode != ray.WORKER_MODE:
        return None
    owner = ray.get_runtime_context().get_worker_id()
    options = {"name": f"raydist-guard-{uuid.uuid4().hex}", "lifetime": "detached", "num_cpus": 0, "max_restarts": 0}
    return ray.remote(ReservationGuard).options(**options).remote(owner, group)


@final
class ReservationGuard:
    """Runs inside a detached actor, which ends itself when it has nothing more to guard.

    Args:
        owner: Ray's id of the process that made the reservation.
        group: The reservation.
    """

    def __init__(self, owner: str, group: PlacementGroup) -> None:
        self._owner = owner
        self._group = group
        threading.Thread(target=self._watch, name="raydist-guard", daemon=True).start()

    def _watch(self) -> None:
        while self._owner in ray._private.state.workers():
            time.sleep(_LOOK_S)
        with contextlib.suppress(Exception):  # the job has ended as well, and Ray was quicker
            remove_placement_group(self._group)
        kill_actors([ray.get_runtime_context().current_actor])
