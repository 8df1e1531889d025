"""All-reduce between Ray actors: raydist's backend and communicator, and Ray's own GLOO group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
import torch
from ray.util import collective
from ray.util.collective import types

from benchmarks.steps.peers.local_ray import keep_ray
from benchmarks.steps.scene import Run, Scene, again, timed
from benchmarks.steps.sizes import SIZES, buffer_of
from raydist.collectives.base import Membership
from raydist.collectives.ray_backend import create_group
from raydist.collectives.rendezvous import RendezvousStore
from raydist.core.values import ReduceOp

OWN, STOCK = "steps-raydist", "steps-gloo"
TIMEOUT_S = 60.0


class Member:
    """An actor that is in a group of each kind."""

    def join(self, membership: Membership) -> None:
        torch.set_num_threads(1)
        self._communicator = create_group(membership, device=torch.device("cpu"), timeout_s=TIMEOUT_S)
        collective.init_collective_group(
            membership.world_size, membership.rank, backend=types.Backend("gloo"), group_name=STOCK
        )

    def all_reduce(self, way: str, num_bytes: int, count: int) -> float:
        """Seconds of so many, one after the other."""
        tensor = buffer_of(num_bytes)

        def once() -> None:
            if way == "communicator":
                self._communicator.all_reduce(tensor, ReduceOp.SUM).wait()
            else:
                collective.allreduce(tensor, OWN if way == "raydist" else STOCK)

        once()
        return timed(lambda: again(once, count))


def make_runs(scene: Scene) -> Mapping[str, Run]:
    keep_ray(4)
    store = scene.resources.enter_context(RendezvousStore())
    members: list[Any] = [ray.remote(Member).options(num_cpus=1).remote() for _ in range(scene.ranks)]
    for member in members:
        scene.resources.callback(ray.kill, member)
    places = [store.membership(OWN, generation=0, rank=rank, world_size=scene.ranks) for rank in range(scene.ranks)]
    ray.get([member.join.remote(place) for member, place in zip(members, places, strict=True)], timeout=TIMEOUT_S)

    def run_of(way: str, num_bytes: int) -> Run:
        return lambda count: max(ray.get([member.all_reduce.remote(way, num_bytes, count) for member in members]))

    return {
        f"{way} {name}": run_of(way, num_bytes)
        for way in ("raydist", "communicator", "gloo")
        for name, num_bytes in SIZES.items()
    }
