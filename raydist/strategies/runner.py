"""One replica at work: unpacks a step, runs it in its replica context, packs the result. No Ray in here.

A step that fails ends this generation of the group: the replica aborts its communicator, so that its peers fail at once
instead of waiting, and refuses every later step until the driver has built a new generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.gradients import GradientReducer
from raydist.collectives.process_group import open_communicator
from raydist.distributed_dataset import ReplicaIterator
from raydist.errors import CancelledError, FailedPreconditionError
from raydist.nest import flatten
from raydist.strategies.context import ReplicaContext, enter_replica
from raydist.strategies.mirror_replica import MirrorReplica
from raydist.strategies.peers import Connected
from raydist.strategies.replica_view import ReplicaView
from raydist.strategies.results import StepResult, pack_result
from raydist.strategies.step import ReplicaSetup, StepHeader, resolve_parts
from raydist.values import Leaves

__all__ = ["ReplicaRunner"]


@final
class ReplicaRunner:
    """Runs the steps of one replica, in order, in one thread; `abort` may come from another."""

    def __init__(self, setup: ReplicaSetup) -> None:
        self._setup = setup
        self._device = torch.device(setup.device)
        self._mirror = MirrorReplica(setup.rank, device=setup.device)
        self._communicator: Communicator | None = None
        self._peers: Connected | None = None
        self._failed_step: int | None = None
        self._seed: int | None = None
        self._view = ReplicaView(setup.worker_devices)
        torch.set_num_threads(setup.num_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def join(self, membership: Membership) -> None:
        """Form a generation of the group with the other replicas; forgets an earlier failure. Blocks until all are in."""
        if self._communicator is None:
            self._communicator = open_communicator(
                membership, device=self._device, timeout_s=self._setup.collective_timeout_s
            )
        else:
            self._communicator.reconfigure(membership)
        reducer = GradientReducer(self._communicator, bucket_bytes=self._setup.bucket_bytes)
        self._peers = Connected(self._communicator, reducer, self._device, self._mirror)
        self._failed_step = None

    def step(self, header: StepHeader, objects: Sequence[Leaves]) -> StepResult:
        """Run one step; what goes wrong in it is raised as it is, with a note on step and replica."""
        peers = self._require_ready(header)
        try:
            return self._run(header, objects, peers)
        except BaseException as error:
            self._failed_step = header.step
            self.abort()
            error.add_note(f"In step {header.step} on replica {self._setup.rank} ({self._device}).")
            raise

    def _require_ready(self, header: StepHeader) -> Connected:
        if self._peers is None or self._communicator is None:
            raise FailedPreconditionError("raydist bug: a replica must join its group before the first step.")
        if self._failed_step is not None or header.generation != self._communicator.membership.generation:
            raise CancelledError(
                f"Step {header.step} was given up on replica {self._setup.rank}, because step {self._failed_step} failed."
            )
        return self._peers

    def _run(self, header: StepHeader, objects: Sequence[Leaves], peers: Connected) -> StepResult:
        self._reseed(header.seed)
        parts = [self._to_device(part) for part in resolve_parts(header.sources, objects)]
        fn, args, kwargs = self._mirror.apply(header.shipment, parts)
        self._bind_iterators((args, kwargs), peers)
        with peers.run(header.rows, header.gradient_reduce_op, stand_in=header.stand_in):
            with enter_replica(ReplicaContext(self._view, peers)):
                value = fn(*args, **kwargs)
        return pack_result(value, absent=peers.stands_in)

    def _bind_iterators(self, arguments: Any, peers: Connected) -> None:
        """Tell iterators among the arguments whose they are: they draw this replica's pieces and say of how many rows."""
        for leaf in flatten(arguments)[0]:
            if isinstance(leaf, ReplicaIterator):
                leaf.bind(self._setup.rank, device=self._device, on_batch=peers.next_batch)

    def _to_device(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor) and part.device != self._device:
            return part.to(self._device, non_blocking=True)
        return part

    def _reseed(self, seed: int) -> None:
        """Follow `torch.manual_seed` of the driver, each replica on a stream of its own (Dropout masks must differ)."""
        if seed != self._seed:
            self._seed = seed
            torch.manual_seed((seed + self._setup.rank) % 2**63)

    def mirror(self, method: str, *args: Any) -> Any:
        """A method of this replica's half of the mirrored variables."""
        return getattr(self._mirror, method)(*args)

    def abort(self) -> None:
        """End this replica's collectives now, and with them its peers'. May come from any thread."""
        if self._communicator is not None:
            self._communicator.abort()

    def close(self) -> None:
        """Leave the group."""
        if self._communicator is not None:
            self._communicator.close()
