"""One replica at work: unpacks a step, runs it in its replica context, packs the result. No Ray in here.

A step that fails ends this generation of the group: the replica aborts its communicator, so that its peers fail at once
instead of waiting, and refuses every later step until the driver has built a new generation.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn, TypeVar, TypeVarTuple, final

import torch

from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.collectives.base import Communicator, Membership
from raydist.collectives.buckets.tail import Updates
from raydist.collectives.deadlock.detector import DeadlockDetector
from raydist.collectives.deadlock.status import Progress
from raydist.collectives.deadlock.watched import WatchedCommunicator
from raydist.collectives.gradients import GradientReducer
from raydist.collectives.opening import open_communicator
from raydist.context.current import enter_replica
from raydist.context.replica_context import ReplicaContext
from raydist.errors import CancelledError, CollectiveMismatchError, FailedPreconditionError
from raydist.foreign_errors import annotate
from raydist.mirroring.calls import MirrorCalls, answer
from raydist.mirroring.replica import MirrorReplica
from raydist.nest import flatten
from raydist.owning_process import call_here
from raydist.replicas.connected import Connected
from raydist.replicas.kept_objects import KeptObjects
from raydist.replicas.replica_view import ReplicaView
from raydist.replicas.results import StepResult, pack_result
from raydist.replicas.step import ReplicaSetup, StepHeader, resolve_parts
from raydist.replicas.step_message import GroupResult, StepMessage
from raydist.values import Leaves

__all__ = ["ReplicaRunner"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

# Values that a step reduces inside of a backward pass must not get between the gradients: each has its own group.
_PURPOSES = ("gradients", "values")


@final
class ReplicaRunner:
    """Runs the steps of one replica, in order, in one thread; `abort` may come from another.

    Args:
        setup: What the replica is.
        join_group: How it joins a group of its peers.
    """

    def __init__(self, setup: ReplicaSetup, join_group: Callable[..., Communicator] = open_communicator) -> None:
        self._setup = setup
        self._join_group = join_group
        self._device = torch.device(setup.device)
        self._view = ReplicaView(setup.worker_devices)
        self._mirror = MirrorReplica(setup.rank, device=setup.device, externals={"strategy": self._view})
        self._communicators: dict[str, Communicator] = {}
        self._progress = Progress()
        self._detector: DeadlockDetector | None = None
        self._generation = -1
        self._aborting = threading.Lock()
        self._peers: Connected | None = None
        self._failed_step: int | None = None
        self._seed: int | None = None
        self._objects = KeptObjects()
        torch.set_num_threads(setup.num_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def join(self, membership: Membership) -> None:
        """Form a generation of the group with the others; forgets an earlier failure. Blocks until all are in."""
        with self._aborting:  # an abort that was meant for the generation before must not meet this one
            self._generation = membership.generation
        self._progress.restart()
        if not self._communicators:
            self._communicators = {purpose: self._open(membership, purpose) for purpose in _PURPOSES}
        else:
            for purpose, communicator in self._communicators.items():
                communicator.reconfigure(_for_purpose(membership, purpose))
        self._mirror.updates.restart()
        reducer = GradientReducer(
            self._communicators["gradients"], bucket_bytes=self._setup.bucket_bytes, updates=self._updates
        )
        self._watch(membership)
        self._peers = Connected(self._communicators["values"], reducer, self._device, self._mirror)
        self._failed_step = None

    def _open(self, membership: Membership, purpose: str) -> Communicator:
        timeout_s = self._setup.collective_timeout_s
        group = self._join_group(
            _for_purpose(membership, purpose), device=self._device, timeout_s=timeout_s, backend=self._setup.backend
        )
        return WatchedCommunicator(group, purpose, self._progress, self._verdict)

    def _watch(self, membership: Membership) -> None:
        """Let a detector see to it that this generation does not wait for itself."""
        if self._detector is not None:
            self._detector.close()
        self._detector = None
        if membership.world_size > 1 and membership.store_host:
            end = functools.partial(self.abort, membership.generation)
            self._detector = DeadlockDetector(membership, self._progress, end).start()

    def _updates(self) -> Updates:
        log = self._mirror.updates
        return Updates(log.count, log.rates())

    def _verdict(self) -> CollectiveMismatchError | None:
        return None if self._detector is None else self._detector.verdict()

    def steps(self, group: StepMessage, objects: Sequence[Leaves]) -> GroupResult:
        """Run some steps; those behind one that fails are refused."""
        results: list[StepResult] = []
        error: BaseException | None = None
        began = time.perf_counter()
        headers = group.steps()
        try:
            objects = self._objects.receive(group.objects, objects)
        except FailedPreconditionError as failure:
            error, self._failed_step = failure, headers[0].step
        for header in headers:
            try:
                results.append(self._step(header, objects))
            except BaseException as failure:  # whatever it is, it is the step's, and its peers are to know
                error = error or failure
        return GroupResult(tuple(results), time.perf_counter() - began, error, self._mirror.take_remarks())

    def _step(self, header: StepHeader, objects: Sequence[Leaves]) -> StepResult:
        """Run one step; what goes wrong in it is raised as it is, with a note on step and replica."""
        peers = self._peers
        if peers is None:
            raise FailedPreconditionError(
                f"raydist bug: replica {self._setup.rank} must join its group before the first step, it was sent step "
                f"{header.step}."
            )
        if self._failed_step is not None or header.generation != self._generation:
            self._refuse(header)
        self._progress.begin_step(header.step)
        try:
            return self._run(header, objects, peers)
        except BaseException as error:
            self._failed_step = header.step
            self.abort(self._generation)
            annotate(error, f"In step {header.step} on replica {self._setup.rank} ({self._device}).")
            raise
        finally:
            self._progress.end_step()

    def _refuse(self, header: StepHeader) -> NoReturn:
        # What the shipment brings is applied all the same: the driver will not send it again.
        self._mirror.apply(header.shipment, [None] * len(header.sources))
        raise CancelledError(
            f"Step {header.step} was given up on replica {self._setup.rank}, because step {self._failed_step} failed."
        )

    def _run(self, header: StepHeader, objects: Sequence[Leaves], peers: Connected) -> StepResult:
        self._reseed(header.seed)
        parts = [self._to_device(part) for part in resolve_parts(header.sources, objects)]
        fn, args, kwargs = self._mirror.apply(header.shipment, parts)
        with (
            self._bound_iterators((args, kwargs), header, peers),
            peers.run(
                header.rows,
                header.gradient_reduce_op,
                stand_in=header.stand_in,
                check_in_sync=header.check_in_sync,
            ),
            enter_replica(ReplicaContext(self._view, peers)),
            self._mirror.guard(),
        ):
            value = call_here(fn, *args, **kwargs)
        # A loop over batches of its own returns what all of them gave, also where its last batch had no rows here.
        absent = header.stand_in and header.rows is not None and header.rows[self._setup.rank] == 0
        return pack_result(value, absent=absent, rows=peers.num_rows_seen)

    @contextlib.contextmanager
    def _bound_iterators(self, arguments: Any, header: StepHeader, peers: Connected) -> Iterator[None]:
        """Iterators among the arguments draw this replica's pieces and tell of how many rows each batch is."""
        empty: Literal["stand_in", "zero_rows"] = "stand_in" if header.stand_in else "zero_rows"
        with contextlib.ExitStack() as stack:
            for leaf in flatten(arguments)[0]:
                if isinstance(leaf, ReplicaIterator):
                    stack.callback(leaf.release)
                    leaf.bind(
                        self._setup.rank,
                        place=self._to_device,
                        on_batch=lambda batch: peers.next_batch(batch.rows),
                        empty_batch=empty,
                    )
            yield

    def _to_device(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor) and part.device != self._device:
            return part.to(self._device, non_blocking=True)
        return part

    def _reseed(self, seed: int) -> None:
        """Follow `torch.manual_seed` of the driver, each replica on a stream of its own (Dropout masks must differ)."""
        if seed != self._seed:
            self._seed = seed
            torch.manual_seed((seed + self._setup.rank) % 2**63)

    def mirror(self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
        """What this replica's half of the mirrored variables answers."""
        return answer(self._mirror, method, *args)

    def ping(self) -> None:
        """Answer, after every step dispatched before."""

    def abort(self, generation: int) -> None:
        """End the collectives of a generation now, and with them its peers'. May come late, and from any thread."""
        with self._aborting:
            if generation == self._generation:
                for communicator in self._communicators.values():
                    communicator.abort()

    def close(self) -> None:
        """Leave the group."""
        if self._detector is not None:
            self._detector.close()
        for communicator in self._communicators.values():
            communicator.close()


def _for_purpose(membership: Membership, purpose: str) -> Membership:
    return replace(membership, group=f"{membership.group}-{purpose}")
