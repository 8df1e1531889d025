"""The part of one replica in a recovery: it goes back to a boundary, or takes over the state of a lost replica."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.base import Membership
from raydist.collectives.reducer.nonfinite import NonfinitePolicy
from raydist.mirroring.blueprints import StateOfParts
from raydist.mirroring.replica import MirrorReplica
from raydist.replicas.device_copies import Accelerator
from raydist.replicas.neighbours import Neighbours
from raydist.replicas.own_state import OwnState, OwnStateReader, Seed
from raydist.replicas.recovery_plan import SurvivorStatus
from raydist.replicas.rollback import Rollback
from raydist.replicas.step import ReplicaSetup, StepHeader

# Distance between the seeds of two replicas: replica 1 of a run must not equal replica 0 of a run with the next seed.
_STREAM = 0x9E3779B97F4A7C15
_LATER = 0xD1B54A32D192ED03  # between those of one replica that joins at two steps


@final
class ReplicaSeeds:
    """The seed of one replica's generators.

    Attributes:
        current: The driver's seed that the generators were last set by; None before.
    """

    def __init__(self, accelerator: Accelerator, rank: int) -> None:
        self._accelerator = accelerator
        self._rank = rank
        self.current: Seed | None = None

    def set(self, seed: Seed, step: int = 0) -> None:
        """Seed this replica from the driver's `torch.manual_seed`. Each replica differs, because Dropout masks must.

        Args:
            step: The first step of a replica that joins a running program, which must not repeat earlier masks.
        """
        self.current = seed
        self._accelerator.seed((seed[0] + self._rank * _STREAM + step * _LATER) % 2**63)

    def note(self, seed: Seed) -> None:
        """Record that the generators were set by this seed, and have gone on since."""
        self.current = seed


@final
@dataclass(frozen=True, slots=True)
class HandedOver:
    """Everything that replicas hold alike, for a new replica.

    Attributes:
        state: The mirrored objects; of sharded modules only the parts of the replica.
        functions: The step functions, by digest.
        seed: The driver's seed that the generators were last set by; None before.
        counts: See `NonfinitePolicy.counts`.
    """

    state: bytes | StateOfParts
    functions: Mapping[bytes, bytes]
    seed: Seed | None
    counts: tuple[int, int]

    @staticmethod
    def of(mirror: MirrorReplica, seeds: ReplicaSeeds, policy: NonfinitePolicy) -> HandedOver:
        """Return the state of a replica."""
        return HandedOver(*mirror.dump_for_newcomer(), seeds.current, policy.counts)

    def load(self, mirror: MirrorReplica, policy: NonfinitePolicy) -> None:
        """Take the state over, except for generators."""
        mirror.load_as_newcomer(self.state, self.functions)
        policy.counts = self.counts


@final
@dataclass(frozen=True, slots=True)
class ReplicaCopy:
    """The whole state of a replica: what all replicas hold alike, and what only this one has."""

    handed: HandedOver
    own: OwnState


@final
class ReplicaRecovery:
    """The copies that one replica keeps for a recovery, and its part in the recovery.

    `num_calls` returns the number of collectives that the replica has called.
    """

    def __init__(
        self,
        mirror: MirrorReplica,
        device: torch.device,
        seeds: ReplicaSeeds,
        policy: NonfinitePolicy,
        num_calls: Callable[[], int],
        setup: ReplicaSetup,
    ) -> None:
        self._mirror = mirror
        self._device = device
        self._seeds = seeds
        self._policy = policy
        self._setup = setup
        self._neighbours = Neighbours()
        self._early: tuple[int, bytes] = -1, b""  # this replica's own state before the last backward pass
        multi_update = "copy" if setup.failures is None else setup.failures.multi_update
        self._own = OwnStateReader(mirror, device)
        self.rollback = Rollback(mirror, device, self._own, num_calls, multi_update)

    def hooks(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return the functions to call when the step function has returned, and when it draws from an iterator."""
        return self.rollback.function_ended, self.rollback.note_draw

    def join(self, membership: Membership) -> None:
        """Connect to the neighbours in a new generation of the group. Blocks until these do."""
        self._neighbours.join(membership, self._setup.collective_timeout_s)

    def begin(self, header: StepHeader, *, exchanges_late: bool) -> None:
        """Begin a step; see `Rollback.begin`."""
        self.rollback.begin(header.step, header.payload.digest, self._seeds.current, exchanges_late=exchanges_late)

    def end(self, *, shared: bool) -> None:
        """End a step; see `Rollback.end`."""
        self.rollback.end(shared=shared)
        self.send_own_state()

    def send_own_state(self) -> None:
        """Send the state that only this replica has to its neighbour, at a boundary.

        Steps without an exchange are sent in any case: the driver does not keep them for a replica that has done them.
        """
        boundary, shared = self.rollback.boundary, self.rollback.shared
        if self.rollback.is_pending or self._setup.world_size == 1:
            return
        state = self.own_state()
        if boundary != shared + 1 or not self._neighbours.has(state):
            self._neighbours.send(boundary, shared, state)

    def own_state(self, rows: bool = False) -> bytes:
        """Return the state that only this replica has, for `adopt`; `rows`: also its rows of embedding tables."""
        return pickle.dumps(self._own.read(self._seeds.current, rows=rows), pickle.HIGHEST_PROTOCOL)

    def note_pass(self, found_gradients: bool) -> None:
        """Send the own state before a backward pass: its peers may end the step although this replica is lost in it."""
        self.rollback.note_pass(found_gradients)
        step, state = self.rollback.step, self.own_state()
        self._early = step + 1, state
        if not self._neighbours.has(state):
            self._neighbours.send(step + 1, step, state, early=True)

    def status(self) -> tuple[SurvivorStatus, list[tuple[int, int]]]:
        """Return this replica's status, and the copies that it keeps for the previous rank."""
        return self.rollback.status(), self._neighbours.copies()

    def go_back(self) -> None:
        """Go back to the last boundary."""
        self._mirror.settle()
        self._seeds.current = self.rollback.go_back(self._seeds.current)

    def copy_for_previous(self, boundary: int) -> bytes:
        """Return the copy of the previous rank's own state at a boundary."""
        return self._neighbours.copy(boundary)

    def hand_over(self) -> HandedOver:
        """Return everything that replicas hold alike, for `adopt`."""
        return HandedOver.of(self._mirror, self._seeds, self._policy)

    def adopt(self, handed: HandedOver, step: int, shared: int, own: bytes | None, is_new: bool) -> None:
        """Take over what another replica holds, and begin at a step.

        Args:
            handed: Result of the other replica's `hand_over`.
            step: The first step that this replica runs.
            shared: The last step before it with an exchange or an update.
            own: The copy of this rank's own state that its neighbour keeps; None for no copy. Only for a new replica.
            is_new: This replica has just started.
        """
        if not is_new:  # a step that others have completed counts as done here, too
            own = self._early[1] if self._early[0] == step else self.own_state()
        handed.load(self._mirror, self._policy)
        mine: OwnState | None = None if own is None else pickle.loads(own)
        if mine is not None:
            mine.restore(self._mirror, self._device)
            self._seeds.current = mine.seed
        elif handed.seed is not None:
            self._seeds.set(handed.seed)
        self.rollback.start_from(step, shared)

    def start_from(self, step: int) -> None:
        """Begin at a step, with a whole state, in a group of another size."""
        self.rollback.start_from(step, step - 1)
        self.send_own_state()

    def close(self) -> None:
        """Close the connections to the neighbours."""
        self._neighbours.close()
