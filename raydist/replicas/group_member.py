"""A replica's seat in the group of its peers: the communicators of one generation, and who watches over them."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.collectives.base import Communicator, Membership
from raydist.collectives.deadlock import DeadlockDetector, Progress, WatchedCommunicator
from raydist.collectives.delegating import ReducingToOne
from raydist.collectives.local import LocalGroup, LocalHub
from raydist.errors import CancelledError, CollectiveMismatchError
from raydist.replicas.step import ReplicaSetup

__all__ = ["GroupMember", "Refusals"]


# Values that a step reduces inside of a backward pass must not get between the gradients: each has its own group.
_PURPOSES = ("gradients", "values")


@final
class GroupMember:
    """Used by the replica's thread; `abort` may come from another.

    Args:
        setup: What the replica is.
        join_group: How it joins a group of its peers.
        device: Where its tensors are.

    Attributes:
        generation: Of the group that it is in; -1 before the first.
        progress: What the replica is at, for whoever watches.
    """

    def __init__(self, setup: ReplicaSetup, join_group: Callable[..., Communicator], device: torch.device) -> None:
        self.generation = -1
        self.progress = Progress()
        self._setup = setup
        self._join_group = join_group
        self._device = device
        self._communicators: dict[str, Communicator] = {}
        self._detector: DeadlockDetector | None = None
        self._aborting = threading.Lock()

    def join(self, membership: Membership) -> None:
        """Form a generation with the others; forgets an earlier failure. Blocks until all are in."""
        with self._aborting:  # an abort that was meant for the generation before must not meet this one
            self.generation = membership.generation
        self.progress.restart()
        if not self._communicators:
            purposes = _PURPOSES if self._setup.rules.exchanges_gradients else _PURPOSES[1:]
            self._communicators = {purpose: self._open(membership, purpose) for purpose in purposes}
        else:
            for purpose, communicator in self._communicators.items():
                communicator.reconfigure(_for_purpose(membership, purpose))

    @property
    def values(self) -> Communicator:
        """What all but gradients travels through."""
        return self._communicators["values"]

    def wire(self, membership: Membership) -> Communicator:
        """What gradients travel through: where they stay here, a group of this replica alone."""
        return self._communicators.get("gradients") or self._own_wire(membership)

    def _own_wire(self, membership: Membership) -> Communicator:
        alone = replace(membership, rank=0, world_size=1)
        group = LocalGroup(LocalHub(), alone, self._setup.collective_timeout_s).start()
        group.device = self._device
        return group

    def _open(self, membership: Membership, purpose: str) -> Communicator:
        timeout_s = self._setup.collective_timeout_s
        device = torch.device(self._setup.device)
        group = self._join_group(
            _for_purpose(membership, purpose), device=device, timeout_s=timeout_s, backend=self._setup.backend
        )
        if self._setup.accumulation is not None:
            group = ReducingToOne(group, self._setup.accumulation)
        return WatchedCommunicator(group, purpose, self.progress, self._verdict)

    def watch(self, membership: Membership) -> None:
        """Let a detector see to it that this generation does not wait for itself."""
        self.unwatch()
        if membership.world_size > 1 and membership.store_host:
            end = functools.partial(self.abort, membership.generation)
            self._detector = DeadlockDetector(membership, self.progress, end).start()

    def _verdict(self) -> CollectiveMismatchError | None:
        return None if self._detector is None else self._detector.verdict()

    def unwatch(self) -> None:
        """Nobody watches any more."""
        detector, self._detector = self._detector, None
        if detector is not None:
            detector.close()

    def abort(self, generation: int) -> None:
        """End the collectives of a generation now, and with them its peers'. May come late, and from any thread."""
        with self._aborting:
            if generation == self.generation:
                for communicator in self._communicators.values():
                    communicator.abort()

    def close(self) -> None:
        """Leave the group."""
        self.unwatch()
        for communicator in self._communicators.values():
            communicator.close()


def _for_purpose(membership: Membership, purpose: str) -> Membership:
    return replace(membership, group=f"{membership.group}-{purpose}")


_KEPT = 8


@final
class Refusals:
    """After a step has failed, those behind it are refused until the next generation.

    Args:
        rank: The replica, for messages.

    Attributes:
        failed_step: The step that failed; None as long as none has.

    >>> refusals = Refusals(1)
    >>> refusals.failed(3, ValueError("bad row"))
    >>> refusals.error(4)
    CancelledError('Step 4 was given up on replica 1, because step 3 failed.')
    """

    def __init__(self, rank: int) -> None:
        self.failed_step: int | None = None
        self._rank = rank
        self._failure: BaseException | None = None
        self._noted: OrderedDict[int, PortableError] = OrderedDict()

    def restart(self) -> None:
        """A generation begins: nothing has failed in it."""
        self.failed_step = self._failure = None

    def failed(self, step: int, error: BaseException) -> None:
        """A step has failed."""
        self.failed_step, self._failure = step, error

    def error(self, step: int) -> CancelledError:
        """What a step is refused with."""
        return CancelledError(
            f"Step {step} was given up on replica {self._rank}, because step {self.failed_step} failed."
        )

    def note(self, step: int) -> None:
        """Keep for a while why a step was refused: somebody will ask beside the steps."""
        cause = self._failure or CancelledError(f"Step {step} was given up: another replica failed.")
        self._noted[step] = pack_error(cause)
        while len(self._noted) > _KEPT:
            self._noted.popitem(last=False)

    def of(self, step: int) -> PortableError | None:
        """Why a step was refused; None where it was not, as far as is known."""
        return self._noted.get(step)
