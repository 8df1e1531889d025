"""The communicators of one replica, in one generation of its group after the other."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.deadlock import DeadlockDetector, Progress, WatchedCommunicator
from raydist.collectives.delegating import RootReducingCommunicator
from raydist.collectives.single_rank import SingleRank
from raydist.core.errors import CollectiveMismatchError
from raydist.replicas.step import ReplicaSetup

# Each purpose has its own group: a reduction inside a backward pass must not be interleaved with gradient reductions.
_PURPOSES = ("gradients", "values")


@final
class GroupMember:
    """Membership of one replica. The replica's thread uses this class; any thread may call `abort`."""

    gradients: Communicator  # communicator of gradients; where gradients stay local, a group of this replica alone
    values: Communicator  # communicator of everything else

    def __init__(self, setup: ReplicaSetup, join_group: Callable[..., Communicator], device: torch.device) -> None:
        self.generation = -1  # current generation (incarnation) of the group; -1 before the first
        self.progress = Progress()  # current step and collective of the replica, for supervisors
        self._setup = setup
        self._join_group = join_group
        self._device = device
        self._communicators: dict[str, Communicator] = {}
        self._detector: DeadlockDetector | None = None
        self._aborting = threading.Lock()

    def join(self, membership: Membership) -> None:
        """Join a generation of the group, and clear an earlier failure. Blocks until all replicas have joined."""
        membership = _among_synced(membership, self._setup.same_rows)
        with self._aborting:  # a late abort of the previous generation must not hit this one
            self.generation = membership.generation
        self.progress.restart()
        for communicator in self._communicators.values():
            communicator.abort()
            communicator.close()
        purposes = _PURPOSES if self._setup.rules.exchanges_gradients else _PURPOSES[1:]
        self._communicators = {purpose: self._open(membership, purpose) for purpose in purposes}
        self._watch(membership)
        self.values = self._communicators["values"]
        alone = replace(membership, rank=0, world_size=1)
        self.gradients = self._communicators.get("gradients") or SingleRank(alone, self._device)

    def _open(self, membership: Membership, purpose: str) -> Communicator:
        group = self._join_group(
            replace(membership, group=f"{membership.group}-{purpose}"),
            device=torch.device(self._setup.device),
            timeout_s=self._setup.collective_timeout_s,
            backend=self._setup.backend,
        )
        if self._setup.accumulation is not None:
            group = RootReducingCommunicator(group, self._setup.accumulation)
        return WatchedCommunicator(group, purpose, self.progress, self._verdict)

    def _watch(self, membership: Membership) -> None:
        """Start a detector of deadlocks in this generation."""
        self.unwatch()
        if membership.world_size > 1 and membership.store_host:
            end = functools.partial(self.abort, membership.generation)
            self._detector = DeadlockDetector(membership, self.progress, end).start()

    def _verdict(self) -> CollectiveMismatchError | None:
        return None if self._detector is None else self._detector.verdict()

    def unwatch(self) -> None:
        """Stop the deadlock detector."""
        detector, self._detector = self._detector, None
        if detector is not None:
            detector.close()

    def abort(self, generation: int) -> None:
        """Abort the collectives of a generation, here and thereby on its peers. May come late, and from any thread."""
        with self._aborting:
            if generation == self.generation:
                for communicator in self._communicators.values():
                    communicator.abort()

    def close(self) -> None:
        """Leave the group."""
        self.unwatch()
        for communicator in self._communicators.values():
            communicator.close()


def _among_synced(membership: Membership, same_rows: int) -> Membership:
    """Return the membership in the group of those replicas, one of each that get the same rows, that this one is in."""
    if same_rows == 1:
        return membership
    place = membership.rank % same_rows
    return replace(
        membership,
        group=f"{membership.group}-{place}",
        rank=membership.rank // same_rows,
        world_size=membership.world_size // same_rows,
        hosts=membership.hosts[place::same_rows],
    )
