"""Run steps on one replica: unpack a step, call it in the replica context, pack the result. Does not use Ray.

A step that fails ends this generation of the group: the replica aborts its communicator, so that its peers fail at once
instead of waiting, and refuses every later step until the driver forms a new generation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, TypeVarTuple, final

import torch

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.checkpoints.replica_loop import ReplicaLoops
from raydist.checkpoints.shard_reader import ShardReader, exchange_bytes
from raydist.checkpoints.shards import MergedStates, Shard, ShardWriter
from raydist.collectives.base import Communicator, Membership
from raydist.collectives.checked import CallLog
from raydist.collectives.opening import open_communicator
from raydist.collectives.reducer.nonfinite import NonfinitePolicy
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.collectives.reducer.trailer import Updates
from raydist.context.run_call import add_hint
from raydist.core.errors import CancelledError, FailedPreconditionError
from raydist.core.exception_utils import annotate
from raydist.core.fork_guard import call_here
from raydist.core.values import Leaves
from raydist.mirroring.messages import MirrorCalls, StepPayload, answer
from raydist.mirroring.object_kinds import names_of, row_tables
from raydist.mirroring.replica import MirrorReplica
from raydist.replicas.device_copies import Accelerator, DeviceCopies, PartsAhead, take_gpu
from raydist.replicas.function_calls import FunctionCalls, ReplicaView, watch_gradient_readers
from raydist.replicas.group_member import GroupMember
from raydist.replicas.own_state import OwnStateReader
from raydist.replicas.replica_recovery import HandedOver, ReplicaCopy, ReplicaRecovery, ReplicaSeeds
from raydist.replicas.results import StepResult, pack_result
from raydist.replicas.rules import StrategyHooks, VariablesView
from raydist.replicas.step import ReplicaSetup, StepHeader, in_sync
from raydist.replicas.step_message import GroupResult, KeptObjects, StepMessage
from raydist.replicas.sync_peers import SyncPeers
from raydist.sharding.divided_rows import DividedTables
from raydist.sharding.initial_values import materialize_new
from raydist.sharding.sharded_modules import ShardedModules

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

_SAVE_S = 2.0  # a gentle close comes after all saves were awaited
_KEPT = 8  # refused saves
_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_ANSWER_S = 0.05
_LOOK_S = 0.0005  # between two looks at the step, in tests of failures


@final
class ReplicaRunner:
    """One replica, which runs its steps in order, in one thread. Any thread may call `abort`."""

    def __init__(
        self,
        setup: ReplicaSetup,
        join_group: Callable[..., Communicator] = open_communicator,
    ) -> None:
        self._setup = setup
        self._accelerator = Accelerator(setup.device)
        self._device = self._accelerator.device
        synced = in_sync(setup)
        self._view = ReplicaView(synced.worker_devices, lambda: self._mirror.objects())
        self._saves = ShardWriter(setup.rank, setup.world_size, self._device, self._merged)
        self._restores = ShardReader(
            synced.rank,
            synced.world_size,
            lambda parts: exchange_bytes(parts, synced.rank, self._device, self.variables.broadcast),
            lambda objects: self._mirror.given_alike(objects.values()),
        )
        self._loops = ReplicaLoops(self._saves)
        self._failure: tuple[int, BaseException] | None = None  # a step that failed, and its error
        self._last_step: int | None = None  # the last step that has arrived in this generation
        self._held_back: list[StepPayload] = []  # payloads of refused steps, which may come again
        self._refused: dict[int, PortableError] = {}  # why the last saves were refused, by their step
        self._sharded = None
        if setup.sharding is not None:
            limit_s = setup.collective_timeout_s
            self._sharded = ShardedModules(
                setup.sharding, setup.rank, setup.world_size, self._device, limit_s, lambda: self._mirror.objects()
            )
        self._policy = NonfinitePolicy(
            lambda parameters: names_of(parameters, self._mirror.objects()),
            first_replica=0 if setup.rules.exchanges_gradients else setup.rank,
        )
        # With rules of their own, replicas may differ; parameter servers hold rows themselves.
        divides = type(setup.rules) is StrategyHooks and setup.same_rows == 1
        self._tables = DividedTables(setup.rank, setup.world_size, self._policy) if divides else None
        self._mirror = MirrorReplica(
            synced.rank,
            world_size=synced.world_size,
            device=str(self._device),
            injected={"strategy": self._view, "saves": self._saves, "restores": self._restores},
            carry_out=self._step_optimizer,
            on_cleared=self._note_cleared,
            prepare=self._prepare,
            keeps_blueprints=setup.sharding is not None and setup.failures is not None,
        )
        self._member = GroupMember(setup, join_group, self._device)
        self._progress = self._member.progress
        self._seeds = ReplicaSeeds(self._accelerator, synced.rank)
        self._peers: SyncPeers | None = None
        self._reducer: GradientReducer | None = None
        self._objects = KeptObjects()
        self._recovery: ReplicaRecovery | None = None
        self._copied_s: float | None = None
        self._awaits_update = False  # a backward pass has ended since the last optimizer step
        if setup.failures is not None and not setup.by_copies:
            self._recovery = ReplicaRecovery(
                self._mirror, self._device, self._seeds, self._policy, lambda: self._progress.num_calls, setup
            )
        torch.set_num_threads(setup.num_threads)
        if setup.world_size > 1:
            watch_gradient_readers()
        if self._device.type == "cuda":
            take_gpu(self._device, setup.rank)
        self._copies = DeviceCopies.to(self._device)
        self._ahead = PartsAhead(self._copies)
        self._calls = FunctionCalls(
            self._mirror,
            self._saves,
            self._loops,
            self._copies,
            self._accelerator,
            setup.collective_timeout_s,
            *(() if self._recovery is None else self._recovery.hooks()),
        )

    def join(self, membership: Membership, again: bool = False) -> None:
        """Join a generation of the group, and clear an earlier failure. Blocks until all replicas have joined.

        Args:
            again: The driver sends the steps that were refused again.
        """
        self._member.join(membership)
        if self._sharded is not None:
            self._sharded.join(replace(membership, group=f"{membership.group}-sharded"))
        held_back, self._held_back = self._held_back, []
        for payload in () if again else held_back:  # the driver will not send it again
            self._mirror.take(payload)
        if self._recovery is not None:
            self._recovery.join(membership)
        self._mirror.optimizer_log.restart()
        calls = CallLog()
        if self._reducer is not None:
            self._reducer.close()  # or its hooks would stay on the parameters
        self._reducer = GradientReducer(
            self._member.gradients,
            bucket_bytes=self._setup.bucket_bytes,
            updates=self._updates,
            calls=lambda: calls.digest,
            policy=self._policy,
            compression=self._setup.compression,
            expect_rows=lambda: row_tables(self._mirror.objects()),
            names=lambda parameters: names_of(parameters, self._mirror.objects()),
            on_pass=self._note_pass,
            end_pass=self._end_pass,
        )
        self._setup.rules.restart()
        self._peers = SyncPeers(
            self._member.values, self._reducer, self._device, self._mirror, self._policy, self._setup.rules, calls
        )
        self._peers.implementation = self._setup.backend
        self._peers.on_weight = self._weigh
        if self._tables is not None:
            self._tables.join(self._member.values, calls)
        if self._sharded is not None:
            self._peers.device_mesh, self._peers.pipelines = self._sharded.mesh, self._sharded.pipelines
        self._peers.recovers = self._setup.failures is not None
        self._calls.join(self._view, self._peers)
        self._failure = None
        self._last_step = None

    def _prepare(self, items: Sequence[tuple[int, Any]]) -> Sequence[tuple[int, Any]]:
        """Give new objects their values on this replica, or its part of them; return them, with changed tensors."""
        found = materialize_new(items, self._device) if self._sharded is None else self._sharded.shard(items)
        if self._tables is not None:
            self._tables.divide(found)
        return found

    def _weigh(self, weight: float) -> None:
        if self._sharded is not None:
            self._sharded.weigh(weight)
        if self._tables is not None:
            self._tables.weight = weight

    def _merged(self, objects: Mapping[str, Any], driver_items: Mapping[str, Mapping[str, int]]) -> MergedStates:
        """Merge the values that differ between replicas; a collective of all replicas."""
        return self._mirror.merge_states(self.variables.gather_objects, objects, driver_items)

    def _step_optimizer(
        self, optimizer: torch.optim.Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._peers is None:
            return step(*args, **kwargs)
        self._awaits_update = False
        if self._tables:
            self._tables.settle()
        if self._recovery is not None:
            step = self._recovery.rollback.noting(step)
        return self._peers.step_optimizer(optimizer, step, *args, **kwargs)

    def _note_cleared(self, optimizer: torch.optim.Optimizer) -> None:
        if self._peers is not None:
            self._peers.note_cleared(parameter for group in optimizer.param_groups for parameter in group["params"])

    def _updates(self) -> Updates:
        log = self._mirror.optimizer_log
        return Updates(log.count, log.rates())

    def steps(self, message: StepMessage, objects: Sequence[Leaves]) -> GroupResult:
        """Run some steps; refuse those after one that fails."""
        results: list[StepResult] = []
        error: BaseException | None = None
        began = time.perf_counter()
        headers = message.steps()
        try:
            self._follow(message.after, headers)
            objects = self._objects.receive(message.objects, objects)
        except FailedPreconditionError as failure:
            error = failure
            self._failure = headers[0].step, failure
        following = [*headers[1:], None] if self._copies.overlap else [None] * len(headers)
        for header, coming in zip(headers, following, strict=True):
            try:
                results.append(self._step(header, objects, coming))
            except BaseException as failure:  # any error belongs to the step: the driver and the peers must get it
                error = error or failure
        try:
            results = [result.arrived() for result in results]
        except BaseException as failure:  # an error of the device
            error, results = error or failure, []
        boundary = None if self._recovery is None else self._recovery.rollback.boundary
        return GroupResult(tuple(results), time.perf_counter() - began, error, self._mirror.take_remarks(), boundary)

    def _follow(self, after: int | None, headers: Sequence[StepHeader]) -> None:
        """Raise if a message before this one has not arrived: Ray drops a call whose arguments are lost."""
        last, self._last_step = self._last_step, headers[-1].step
        if after is not None and after != last:
            raise FailedPreconditionError(
                f"Steps must come in their order, but step {headers[0].step}, which follows step {after}, came after "
                f"step {last}. A message between them was lost."
            )

    def run_one(self, header: StepHeader, objects: Sequence[Leaves]) -> StepResult:
        """Run one step in a group of one replica; after a failure the caller must call `join` before the next step.

        Args:
            header: Header of the step, with the current generation.
        """
        return self._step(header, objects, None).arrived()

    @property
    def mirrored(self) -> MirrorReplica:
        """The mirrored objects of this replica."""
        return self._mirror

    @property
    def variables(self) -> VariablesView:
        """The view of this replica that rules get, once it has joined its group."""
        if self._peers is None:
            raise FailedPreconditionError("raydist bug: a replica must join its group before rules see its variables.")
        return self._peers.variables

    def _step(self, header: StepHeader, objects: Sequence[Leaves], coming: StepHeader | None) -> StepResult:
        """Run one step; an error is raised unchanged, with a note that names the step and the replica.

        Meanwhile the batch of the `coming` step is copied to the device.
        """
        peers = self._peers
        if peers is None:
            raise FailedPreconditionError(
                f"raydist bug: replica {self._setup.rank} must join its group before the first step, it was sent step "
                f"{header.step}."
            )
        if self._failure is not None or header.generation != self._member.generation:
            self._refuse(header)
        self._progress.begin_step(header.step)
        try:
            if self._accelerator.defers:
                self._accelerator.enter()
            result = self._run(header, objects, coming, peers)
            if self._sharded is not None:
                self._sharded.end_step()
            return result
        except BaseException as caught:
            error = caught if self._sharded is None else self._sharded.translate(caught)
            self._calls.drop_records()
            self._failure = header.step, error
            self._note_refused(header)
            self._member.abort(self._member.generation)
            if self._sharded is not None:
                self._sharded.leave()
            add_hint(error)
            where = f" of {self._setup.host}" if self._setup.host else ""
            annotate(error, f"In step {header.step} on replica {self._setup.rank} ({self._device}){where}.")
            if error is not caught:
                raise error from caught
            raise
        finally:
            self._progress.end_step()

    def _refuse(self, header: StepHeader) -> NoReturn:
        self._held_back.append(header.payload)
        self._note_refused(header)
        reason = "another replica failed" if self._failure is None else f"step {self._failure[0]} failed"
        raise CancelledError(f"Step {header.step} was given up on replica {self._setup.rank}, because {reason}.")

    def _run(
        self, header: StepHeader, objects: Sequence[Leaves], coming: StepHeader | None, peers: SyncPeers
    ) -> StepResult:
        if self._recovery is not None:
            self._recovery.begin(header, exchanges_late=peers.exchanges_late(header.rows))
        self._set_generators(header)
        if header.is_given_up:
            return self._take_only(header)
        sources = header.sources
        parts = [self._copies.finish(part) for part in self._ahead.begun(header, objects)] if sources else []
        if coming is not None:
            self._ahead.begin(coming, objects)
        fn, args, kwargs = self._mirror.apply(header.payload, parts)
        if header.looks_only:
            self._mirror.settle()
            result = pack_result(call_here(fn, *args, **kwargs), absent=False)
        else:
            value = self._calls.call(header, peers, fn, args, kwargs)
            if self._accelerator.defers:
                self._accelerator.leave()
            result = self._calls.pack(value, header, peers)
        if self._recovery is not None:
            self._recovery.end(shared=header.looks_only)
        return result

    def _set_generators(self, header: StepHeader) -> None:
        if header.seed != self._seeds.current:
            self._seeds.set(header.seed)
        if len(header.random) == self._setup.world_size:
            self._saves.set_random(header.random[self._setup.rank])

    def _take_only(self, header: StepHeader) -> StepResult:
        """Take what a step brings that is not run."""
        with contextlib.suppress(Exception):  # it may be why the step failed
            self._mirror.take(header.payload)
        if self._recovery is not None:
            self._recovery.end(shared=True)
        return pack_result(None, absent=False)

    def _note_pass(self, found_gradients: bool) -> None:
        self._awaits_update = True
        if self._recovery is not None:
            self._recovery.note_pass(found_gradients)

    def _end_pass(self, local: bool) -> None:
        if self._tables:
            self._awaits_update = True
            self._tables.keep(self._mirror.has)
            self._tables.end_pass(local)

    def recovery(self, method: Callable[[ReplicaRecovery, *_Args], _T], *args: *_Args) -> _T:
        """Call a method of this replica's part in a recovery."""
        if self._recovery is None:
            raise FailedPreconditionError("raydist bug: this replica keeps nothing to go back to.")
        found: _T = getattr(self._recovery, method.__name__)(*args)
        return found

    def require_exchanged(self) -> None:
        """Raise FailedPreconditionError if gradients of `no_sync` exist on this replica only."""
        waiting = self._tables is not None and self._tables.holds_local_gradients
        if waiting or (self._reducer is not None and self._reducer.holds_local_gradients):
            raise FailedPreconditionError(
                "All gradients must have been exchanged before the replicas change, but some of no_sync() wait for the "
                "next backward pass. Resize after a step that calls optimizer.step()."
            )

    def hand_over(self) -> HandedOver:
        """Return what the replicas of a group of another size take over."""
        return HandedOver.of(self._mirror, self._seeds, self._policy)

    def take_over(self, handed: HandedOver, step: int, is_new: bool) -> None:
        """Take over what the replicas of a group of another size held; `step` is the next step.

        Args:
            is_new: This process has just started; the generators of the others go on.
        """
        handed.load(self._mirror, self._policy)
        if handed.seed is not None:
            self._seeds.set(handed.seed, step) if is_new else self._seeds.note(handed.seed)
        if self._recovery is not None:
            self._recovery.start_from(step)

    def copy_state(self) -> ReplicaCopy | None:
        """Return a copy of this replica's state; None while gradients wait for an optimizer, or after a failed step."""
        began, self._copied_s = time.perf_counter(), None
        if self._failure is not None or (self._awaits_update and self._mirror.optimizer_log.optimizers()):
            return None
        handed = HandedOver.of(self._mirror, self._seeds, self._policy)
        own = OwnStateReader(self._mirror, self._device).read(self._seeds.current, rows=True)
        self._copied_s = time.perf_counter() - began
        return ReplicaCopy(handed, own)

    def copy_seconds(self) -> float | None:
        """Return the seconds that the last `copy_state` took; None if it made no copy."""
        return self._copied_s

    def load_copy(self, first: ReplicaCopy, mine: ReplicaCopy, step: int) -> None:
        """Take over what the first replica's copy and this rank's copy hold; `step` is the next step.

        Where replicas hold parts of modules, `first` is this rank's copy, too.
        """
        first.handed.load(self._mirror, self._policy)
        mine.own.restore(self._mirror, self._device)
        if mine.own.seed is not None:
            self._seeds.note(mine.own.seed)
        if self._recovery is not None:
            self._recovery.start_from(step)

    def mirror(self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
        """Call a method of this replica's mirrored objects."""
        return answer(self._mirror, method, *args)

    def _note_refused(self, header: StepHeader) -> None:
        """Record a refused step, for calls concurrent with the steps."""
        self._loops.note_ended(header.step)
        if header.looks_only:
            other = CancelledError(f"Step {header.step} was given up: another replica failed.")
            self._refused[header.step] = pack_error(other if self._failure is None else self._failure[1])
            if len(self._refused) > _KEPT:
                del self._refused[next(iter(self._refused))]

    def shard_of(self, step: int, token: str) -> Shard | PortableError | None:
        """Return the result of a save dispatched as this step; None until it is known. Runs beside the steps."""
        found = self._saves.report(token)
        return pack_error(found) if isinstance(found, Exception) else found or self._refused.get(step)

    def loop(self, method: Callable[[ReplicaLoops, *_Args], _T], *args: *_Args) -> _T:
        """Call a method of the runs that draw batches from iterators. Runs beside the steps."""
        found: _T = getattr(self._loops, method.__name__)(*args)
        return found

    def nonfinite_counts(self) -> tuple[int, int]:
        """Return the number of backward passes with NaN or infinities, and of optimizer steps skipped for that."""
        return self._policy.counts

    def gpus(self) -> dict[str, str]:
        """Return the environment variable by which Ray shows this process its GPUs; empty without GPUs."""
        return {name: os.environ[name] for name in _GPUS if self._device.type == "cuda" and name in os.environ}

    def ping(self) -> None:
        """Return after every step dispatched before."""

    def abort(self, generation: int) -> None:
        """Abort the collectives of a generation, here and thereby on its peers. May come late, and from any thread."""
        self._member.abort(generation)

    def fail_at(self, step: int, how: str) -> bool:
        """Kill, stop or end this process once a step has begun, and return True. For tests of failures."""
        threading.Thread(target=self._fail_at, args=(step, how), name="raydist-fault", daemon=True).start()
        return True

    def _fail_at(self, step: int, how: str) -> None:
        time.sleep(_ANSWER_S)  # the answer to `fail_at` goes first
        while self._progress.step < step:
            time.sleep(_LOOK_S)
        if how == "exit":
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def close(self) -> None:
        """Leave the group."""
        self._member.unwatch()
        self._setup.rules.close()
        self._saves.close(_SAVE_S)
        if self._recovery is not None:
            self._recovery.close()
        self._member.close()
        if self._sharded is not None:
            self._sharded.leave()
