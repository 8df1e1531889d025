"""Replacing lost replicas: what the driver does between the loss and the next step.

1. The collectives of this generation are aborted, so that the survivors' steps end.
2. New processes start in the place of the lost ones; Ray moves those of a lost node to another one.
3. The survivors say where they stand, and `plan_recovery` decides. If nobody has a whole state, all replicas start
   again from the last copy (`StateCopies`).
4. All replicas join a new generation. The survivors go back; new replicas take over what all hold alike from a
   survivor, and their predecessors' own state from the neighbour.
5. Batches of unfinished steps are made again if their input pipeline was lost.
6. The unfinished steps are sent again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from raydist.actors.readers.driver_epoch import DrawnBatch, make_again
from raydist.actors.replica import Place, ReplicaActors
from raydist.actors.supervision import may_be_loss, root_cause
from raydist.cluster.nodes import living_nodes
from raydist.collectives.base import Membership
from raydist.core.errors import DeadlineExceededError, UnavailableError
from raydist.core.exception_utils import annotate, describe
from raydist.options import FailureOptions, Timeouts
from raydist.replicas.dispatched_steps import DispatchedSteps
from raydist.replicas.recovery_plan import RecoveryPlan, SurvivorStatus, plan_recovery
from raydist.replicas.replica_recovery import ReplicaRecovery
from raydist.replicas.runner import ReplicaRunner
from raydist.replicas.state_copies import CopyPoint, StateCopies
from raydist.replicas.step import ReplicaSetup, with_hosts

_log = logging.getLogger("raydist")
_ANSWER_S = 3.0  # a replica that does not say within this time that it lives is taken for stopped


@final
@dataclass(frozen=True, slots=True)
class ReplicaFailure:
    """One recovery from the loss of replicas, or of the input pipeline with the batches of unfinished steps.

    Attributes:
        step: Number of the first step that ran again.
        ranks: The replicas that were replaced; empty if none was lost.
        reason: What happened, for people.
        num_repeated: Number of steps that ran again.
        num_lost_results: Number of results (one for each step and replica) that nobody has: the replica had finished
            its part of a step, but not delivered it.
        seconds: From the error to the next step.
    """

    step: int
    ranks: tuple[int, ...]
    reason: str
    num_repeated: int
    num_lost_results: int
    seconds: float


@final
class Recovery:
    """The recovery of one group of replicas. Used by the thread that waits for steps.

    `setups` and `hosts` have the setup and the node of each rank. They change when a replica moves to another node.
    `told` is called with each recovery.
    """

    def __init__(
        self,
        setups: list[ReplicaSetup],
        actors: ReplicaActors,
        steps: DispatchedSteps,
        copies: StateCopies,
        options: FailureOptions,
        timeouts: Timeouts,
        *,
        hosts: list[str],
        start: Callable[[int], Any],
        membership: Callable[[ReplicaSetup], Membership],
        told: Callable[[ReplicaFailure], None],
    ) -> None:
        self._setups, self._actors, self._steps = setups, actors, steps
        self._copies = copies
        self._options, self._timeouts = options, timeouts
        self._hosts = hosts
        self._start = start
        self._membership = membership
        self._new: set[int] = set()  # ranks of replacements that hold no state yet
        self._losses: list[float] = []  # times of losses
        self._attempts: dict[int, int] = {}  # by first step
        self._told = told
        self.without_place: set[int] = set()  # ranks that share the place of others, because there was no room for them

    def recover(self, error: Exception) -> bool:
        """Replace what was lost and send the unfinished steps again; return False if `error` comes from no loss.

        Blocks while the new processes start, at most `FailureOptions.replace_s`, and while survivors end their steps.

        Raises:
            UnavailableError: The options allow no further replacement, or nobody has a whole state.
        """
        began, first = time.monotonic(), error
        lost: dict[int, str] = {}
        pipelines: dict[str, str] = {}
        while True:
            if not may_be_loss(error):
                return False
            found = self._find_lost()
            without_input = {each.link.name: f"{each.link.name} is gone" for each in self._lost_batches()}
            by_peers = isinstance(error, UnavailableError) and error.actor is None  # a connection broke
            first_time = not (lost or pipelines or self._attempts.get(self._steps.first_unfinished))
            if not (found or without_input or (by_peers and first_time)):
                if error is not first:
                    annotate(first, f"Replacing what was lost failed: {describe(error)}")
                return False
            lost.update(found)
            pipelines.update(without_input)
            self._require_allowed(error, len(found) + len(without_input))
            try:
                step, lost_results = self._try(found)
            except Exception as another:
                if not may_be_loss(another):
                    raise
                error = another
            else:
                break
        seconds = time.monotonic() - began
        reason = "; ".join(dict.fromkeys([*lost.values(), *pipelines.values()])) or describe(error)
        num_repeated = self._steps.last - step + 1
        self._told(ReplicaFailure(step, tuple(sorted(lost)), reason, num_repeated, lost_results, seconds))
        replaced = [*(f"replica {rank}" for rank in sorted(lost)), *pipelines]
        _log.warning(
            "%s. Replaced in %.1f s: %s. Training continues from step %d%s.",
            reason,
            seconds,
            " and ".join(replaced) or "nothing",
            step,
            f", without {lost_results} results that were lost" if lost_results else "",
        )
        return True

    def start_over(self) -> None:
        """Start all replicas again from the last copy after a failed step, which does not count. Blocks.

        The steps between the copy and the failed step run again.

        Raises:
            UnavailableError: There is no copy.
        """
        began, failed = time.monotonic(), self._steps.set_aside()
        self._copies.point()  # waits for a copy that is under way, while the replicas live
        try:
            first, _ = self._try({setup.rank: "" for setup in self._setups}, failed)
        except Exception as error:
            if not self.recover(error):
                raise
        else:
            _log.warning(
                "Step %d failed, so all replicas have started again from a copy of their state, in %.1f s. Steps run "
                "again: %d.",
                failed,
                time.monotonic() - began,
                failed - first,
            )

    def move(self, ranks: Sequence[int], places: Sequence[Place] = ()) -> None:
        """Move replicas to other processes, with their state. All steps must have ended. Blocks while these start.

        Args:
            places: Where the new processes run; empty for beside the other replicas.

        Raises:
            FailedPreconditionError: Gradients of `no_sync` wait to be exchanged. Nothing has changed.
        """
        everyone = [setup.rank for setup in self._setups]
        staying = [rank for rank in everyone if rank not in ranks]
        ready = [self._actors.call(rank, ReplicaRunner.require_exchanged.__name__) for rank in everyone]
        self._wait(ready, "moving", self._timeouts.start_s)
        handed = self._call(staying[0], ReplicaRecovery.hand_over)
        states = [self._call(rank, ReplicaRecovery.own_state, True) for rank in ranks]
        own = dict(zip(ranks, self._wait(states, "handing over", self._timeouts.start_s), strict=True))
        self._wait([handed], "handing over", self._timeouts.start_s)
        for number, rank in enumerate(ranks):
            if places:
                self._actors.replace_in(rank, places[number])
            else:
                self._actors.replace_beside(rank, staying[number % len(staying)])
        self._new |= set(ranks)
        self.without_place = self.without_place - set(ranks) if places else self.without_place | set(ranks)
        self._start_new(has_room=True)
        self._join(again=False)
        step, adopt = self._steps.last + 1, ReplicaRecovery.adopt
        adopts = [self._call(rank, adopt, handed, step, step - 1, own[rank], True) for rank in ranks]
        self._wait(adopts, "taking over the state", self._timeouts.start_s)
        self._ask(everyone, ReplicaRecovery.send_own_state)
        self._steps.send_again([step] * len(everyone))
        self._new.clear()

    def _find_lost(self) -> dict[int, str]:
        """Return the replicas that are gone or do not answer, with the reason."""
        return {
            rank: reason
            for rank, reason in self._actors.lost(_ANSWER_S).items()
            if rank not in self._new or "does not answer" not in reason
        }

    def _lost_batches(self) -> list[DrawnBatch]:
        """Return the batches of unfinished steps whose input pipeline is gone."""
        batches = self._steps.batches()
        links = {each.link.name: each.link for each in batches}
        gone = {name for name, link in links.items() if link.is_lost()}
        return [each for each in batches if each.link.name in gone]

    def _require_allowed(self, error: Exception, number: int) -> None:
        now, options = time.monotonic(), self._options
        self._losses = [at for at in self._losses if now - at < options.within_s] + [now] * number
        step = self._steps.first_unfinished
        self._attempts = {step: self._attempts.get(step, 0) + 1}
        if len(self._losses) > options.max_failures:
            why = f"{len(self._losses)} replicas were lost within {options.within_s:g} s (FailureOptions.max_failures)"
        elif self._attempts[step] > options.attempts_per_step:
            why = f"step {step} has lost replicas {options.attempts_per_step} times (FailureOptions.attempts_per_step)"
        else:
            return
        raise self._given_up(error, why)

    def _given_up(self, error: Exception, why: str) -> Exception:
        self._steps.dead = self._steps.dead or UnavailableError(f"{describe(error)} No replica is replaced: {why}.")
        annotate(error, f"No replica was replaced: {why}. Start the program again from its last checkpoint.")
        return error

    def _try(self, lost: dict[int, str], before: int | None = None) -> tuple[int, int]:
        """Recover once; return the first step that runs again, and the number of lost results.

        Args:
            lost: The lost replicas, with the reason.
            before: The first step that does not run again; None for all.
        """
        setup = self._setups[0]
        if setup.die_together and (lost or setup.sharding is not None):
            self._actors.replace_all()
            self._new |= {setup.rank for setup in self._setups}
        else:
            for rank in lost:
                self._actors.replace(rank)
            self._new |= lost.keys()
        survivors = [setup.rank for setup in self._setups if setup.rank not in self._new]
        self._await_ends(survivors)
        all_again = self._copies.always or self._copies.is_needed(self._steps.first_unfinished)
        plan = None if all_again else self._plan(survivors)
        if plan is None:
            return self._start_over(survivors, self._copies.point(), self._steps.last + 1 if before is None else before)
        self._start_new()
        self._join(again=True)
        self._ask(survivors, ReplicaRecovery.go_back)
        state = self._call(plan.source, ReplicaRecovery.hand_over)
        adopts = []
        for rank in sorted(plan.adopt):
            own = self._own_state(rank, plan) if rank in self._new else None
            args = state, plan.resume[rank], plan.shared, own, rank in self._new
            adopts.append(self._call(rank, ReplicaRecovery.adopt, *args))
        self._wait(adopts, "taking over the state", self._timeouts.start_s)
        self._ask([setup.rank for setup in self._setups], ReplicaRecovery.send_own_state)  # neighbours may be new
        return plan.first, self._send_again(plan.resume)

    def _send_again(self, resume: Sequence[int], *, from_copies: bool = False) -> int:
        self._new.clear()
        make_again(self._lost_batches())
        self._steps.failed, self._steps.dead = False, None
        return self._steps.send_again(resume, from_copies=from_copies)

    def _start_over(self, survivors: Sequence[int], point: CopyPoint | None, before: int) -> tuple[int, int]:
        """Make all replicas go back to copies of their states. Survivors keep their processes."""
        if point is None:
            error = root_cause([UnavailableError("No surviving replica has a whole state")])
            raise self._given_up(error, "a step was interrupted that cannot be run again")
        left = [self._actors.call(rank, ReplicaRunner.close.__name__) for rank in survivors]
        self._wait(left, "leaving the group", self._timeouts.close_s, "Timeouts.close_s")
        self._start_new()
        self._wait([self._start(rank) for rank in survivors], "starting again", self._timeouts.start_s)
        self._join(again=False)
        if point.copies:
            in_parts = self._setups[0].sharding is not None
            loads = [
                self._actors.call(
                    rank, ReplicaRunner.load_copy.__name__, copy if in_parts else point.copies[0], copy, point.step
                )
                for rank, copy in enumerate(point.copies)
            ]
            self._wait(loads, "taking over the state", self._timeouts.start_s)
        point.begin_again(before)
        return point.step, self._send_again([point.step] * len(self._setups), from_copies=True)

    def _await_ends(self, survivors: Sequence[int]) -> None:
        """Wait until the survivors have ended the steps that were sent, well or badly."""
        self._steps.abort()
        refs = [ref for rank in survivors for ref in self._steps.unfinished_refs(rank)]
        if not self._actors.are_ready(refs, self._timeouts.step_s):
            raise DeadlineExceededError(
                f"Replicas must end their steps after another one was lost, but did not within "
                f"{self._timeouts.step_s:g} s (Timeouts.step_s)."
            )

    def _plan(self, survivors: Sequence[int]) -> RecoveryPlan | None:
        """Return the plan to go on with the survivors' states; None if there is none."""
        said = dict(zip(survivors, self._ask(survivors, ReplicaRecovery.status), strict=True))
        statuses: dict[int, SurvivorStatus] = {rank: status for rank, (status, _) in said.items()}
        size = len(self._setups)
        copies = {rank: said[(rank + 1) % size][1] for rank in self._new if (rank + 1) % size in said}
        plan = plan_recovery(statuses, copies, size)
        return plan if plan is not None and self._steps.can_go_back_to(plan.first) else None

    def _own_state(self, rank: int, plan: RecoveryPlan) -> Any:
        """Return the reference of a lost rank's own state, which its neighbour keeps; None if nobody does."""
        at = plan.copies.get(rank)
        if at is None:
            return None
        return self._call((rank + 1) % len(self._setups), ReplicaRecovery.copy_for_previous, at)

    def _start_new(self, *, has_room: bool = False) -> None:
        """Start the runners of the new processes, once these answer: they may be on other nodes than before.

        Args:
            has_room: Their places are reserved; else the cluster may have no room for some, which start beside others.
        """
        ranks = sorted(self._new)
        answers = [self._actors.about(rank) for rank in ranks]
        if not has_room and (late := self._late(ranks, answers)):
            self._start_beside(late)
            answers, has_room = [self._actors.about(rank) for rank in ranks], True
        if has_room:
            self._wait(answers, "starting again", self._timeouts.start_s)
        else:
            self._wait(answers, "starting again", self._options.replace_s, "FailureOptions.replace_s")
        hosts = {rank: self._actors.present_host(rank) for rank in ranks}
        if any(self._hosts[rank] != host for rank, host in hosts.items()):
            for rank, host in hosts.items():
                self._hosts[rank] = host
            setups = with_hosts(self._setups, self._hosts, {node.node_id: node for node in living_nodes()})
            for rank, host in hosts.items():
                self._setups[rank] = setups[rank]
                self._actors.moved(rank, host, setups[rank].host)
        self._wait([self._start(rank) for rank in ranks], "starting again", self._timeouts.start_s)

    def _late(self, ranks: Sequence[int], answers: Sequence[Any]) -> list[int]:
        """Return the new processes that an elastic strategy goes on without, once it has waited for them."""
        elastic = self._options.elastic
        if elastic is None or self._actors.are_ready(answers, self._options.replace_s):
            return []
        late = [rank for rank, ref in zip(ranks, answers, strict=True) if not self._actors.are_ready([ref], 0)]
        return late if len(self._setups) - len(late) >= elastic.min_replicas else []

    def _start_beside(self, late: Sequence[int]) -> None:
        """Start processes beside those of the survivors: the cluster has no room for them elsewhere."""
        survivors = [setup.rank for setup in self._setups if setup.rank not in self._new]
        for number, rank in enumerate(late):
            self._actors.replace_beside(rank, survivors[number % len(survivors)])
        self.without_place |= set(late)

    def _join(self, *, again: bool) -> None:
        """Form a new generation of all replicas; with `again`, refused steps are sent again."""
        self._steps.generation += 1
        joins = [
            self._actors.call(setup.rank, ReplicaRunner.join.__name__, self._membership(setup), again)
            for setup in self._setups
        ]
        self._wait(joins, "joining the group again", self._timeouts.start_s)

    def _call(self, rank: int, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method of a replica's `ReplicaRecovery`; return the reference of the result."""
        return self._actors.call(rank, ReplicaRunner.recovery.__name__, method, *args)

    def _ask(self, ranks: Sequence[int], method: Callable[..., Any]) -> list[Any]:
        refs = [self._call(rank, method) for rank in ranks]
        return self._wait(refs, method.__name__, self._timeouts.start_s)

    def _wait(self, refs: Sequence[Any], doing: str, limit_s: float, limit: str = "Timeouts.start_s") -> list[Any]:
        names = [doing] * len(refs)
        return self._actors.wait(refs, names, timeout_s=limit_s, doing=doing, limit=limit, on_error=self._steps.abort)
