"""Data of one dispatched step: the driver builds one header for each replica, and the replica reads it. Does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast, final

import torch

from raydist.checkpoints.loop_commands import LoopCommand
from raydist.checkpoints.random_state import RESTORED_REPLICAS
from raydist.cluster.nodes import Node
from raydist.collectives.delegating import RootReduction
from raydist.context.seed_calls import num_seed_calls
from raydist.core.errors import InvalidArgumentError
from raydist.core.values import Leaves, PerReplica, ReduceOp
from raydist.mirroring.messages import StepPayload
from raydist.options import FailureOptions, RunOptions
from raydist.pickling.torch_objects import by_fields
from raydist.replicas.rules import StrategyHooks
from raydist.sharding.units import ShardingPlan
from raydist.summary.recording import SummaryOrder
from raydist.utils.torch_modes import TorchModes


@final
@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """Configuration of a replica, fixed when its actor starts."""

    name: str  # the strategy's unique name
    rank: int  # rank of this replica, 0 .. world_size - 1; for workers without peers, the number of the worker.
    world_size: int  # number of replicas
    device: str  # the `torch.device` name of the replica, in its own process
    worker_devices: tuple[str, ...]  # the names of all replicas' devices, for the user
    num_threads: int  # number of threads of torch's operators
    collective_timeout_s: float  # time limit of a collective in seconds
    bucket_bytes: int  # size of one gradient bucket
    backend: str = "auto"  # name of the collective backend; "auto" for the device's default
    # type of gradients in collectives: "fp16", "bf16", or None for their own type
    compression: Literal["fp16", "bf16"] | None = None
    worker: int = 0  # number of the replica's worker (node), 0 .. num_workers - 1.
    host: str = ""  # name of the replica's node, for messages; empty if unknown
    rules: StrategyHooks = field(default_factory=StrategyHooks)  # rules of the replica
    # the replica that reduces for all, and how; None if each replica reduces its part
    accumulation: RootReduction | None = None
    failures: FailureOptions | None = None  # what happens when a replica is lost; None for an error
    # all replicas go back to a copy of the whole state; else the replica keeps what it needs to go back one step
    by_copies: bool = False
    sharding: ShardingPlan | None = None  # how modules are divided among replicas; None: each holds them whole
    same_rows: int = 1  # number of consecutive ranks that get the same rows of a batch, and are one replica in sync
    die_together: bool = False  # if one process is lost, all of them start again: those of a TPU slice


def in_sync(setup: ReplicaSetup) -> ReplicaSetup:
    """Return the setup with the rank among the replicas that get different rows.

    >>> setup = ReplicaSetup("a", 3, 4, "cpu", ("CPU:0",) * 4, 1, 60.0, 1, same_rows=2)
    >>> in_sync(setup).rank, in_sync(setup).world_size
    (1, 2)
    """
    count = setup.same_rows
    devices = setup.worker_devices[::count]
    return replace(setup, rank=setup.rank // count, world_size=setup.world_size // count, worker_devices=devices)


def with_hosts(
    setups: Sequence[ReplicaSetup], hosts: Sequence[str], nodes: Mapping[str, Node]
) -> tuple[ReplicaSetup, ...]:
    """Return the setups with the names of the replicas' nodes, and the nodes' cores divided by the replicas there.

    Args:
        setups: A setup for each replica.
        hosts: The node id of each replica.
        nodes: Nodes by id; replicas on unknown nodes keep their setup.
    """
    num_there = Counter(hosts)
    return tuple(
        replace(setup, host=nodes[host].title, num_threads=max(1, nodes[host].num_cpus // num_there[host]))
        if host in nodes
        else setup
        for setup, host in zip(setups, hosts, strict=True)
    )


@final
@dataclass(frozen=True, slots=True)
class PartSource:
    """Location of a replica's part of one PerReplica argument."""

    object_index: int | None  # index of the step's object argument with the part; None if `value` is the part
    leaf_index: int = 0  # index of the leaf in the object
    value: Any = None  # the part itself, for values from the driver
    place: int = 0  # position of the step, in an object with the results of several steps
    on_host: bool = False  # True if the part is not moved to the replica's device
    nest: str = ""  # for results of steps, the expected structure as a string; empty if the structure is known

    __reduce__ = by_fields


@final
@dataclass(slots=True)  # never changed, but not frozen: unpickling would take twice as long, in every step
class StepHeader:
    """One step for one replica. Objects of Ray's object store are separate arguments of the actor call."""

    step: int  # number of the step, counted by the strategy
    generation: int  # generation of the group; a replica refuses steps of another generation
    payload: StepPayload  # the function, its plain arguments and the driver's changes
    sources: tuple[PartSource, ...] = ()  # locations of the PerReplica arguments, in the order of the payload
    # rows of the first distributed batch among the arguments on each replica; None without one
    rows: tuple[int, ...] | None = None
    gradient_reduce_op: ReduceOp = ReduceOp.MEAN  # MEAN (by rows) or SUM
    # True if replicas without rows run on padding rows, whose results are ignored; else on zero rows
    padding: bool = True
    # the driver's torch seed, and how often it was set. A change of either reseeds the replica.
    seed: tuple[int, int] = (0, 0)
    param_sync_every: int = 0  # number of batches between comparisons of the replicas; 0 for none
    # reaction to a NaN or an infinity in a gradient; see `RunOptions`
    on_nonfinite: Literal["pass", "raise", "skip"] = "pass"
    # settings of `rd.summary` at the driver's call of `run`; None for the defaults
    summaries: SummaryOrder | None = None
    # state of each replica's random generator after a restore; empty if there is none to set
    random: tuple[tuple[bytes, ...], ...] = ()
    # True if the function only reads the replica's objects: rules and checks do not count it as a step
    looks_only: bool = False
    # True if the step only brings what later steps need: its function failed, or followed one that failed
    is_given_up: bool = False
    # settings of step boundaries at draws from iterators; None if there are no such boundaries
    loop: LoopCommand | None = None
    # torch modes at the driver's call of `run`, if they are not torch's defaults; else None
    modes: TorchModes | None = None

    __reduce__ = by_fields

    def is_padded(self, rank: int) -> bool:
        """Return True if a replica has no rows of the first batch and runs on padding rows: its results are ignored.

        If no replica has rows, no replica uses padding rows: the step runs as on one device.
        """
        return self.padding and self.rows is not None and self.rows[rank] == 0 and any(self.rows)

    def in_group(self, generation: int, sources: tuple[PartSource, ...]) -> StepHeader:
        """Return the same step for a replica of this generation, with the replica's locations."""
        return replace(self, generation=generation, sources=sources)


def address_parts(
    values: Sequence[PerReplica], rank: int, *, padding: bool, refs: dict[Any, int]
) -> tuple[PartSource, ...]:
    """Return the locations of replica `rank`'s parts of `values`.

    Args:
        refs: The object references to send along, each with its position; missing references are added.
    """
    sources = []
    for value in values:
        part = value.part_on(rank, padding=padding)
        if part.ref is None:
            sources.append(PartSource(None, value=part.value, on_host=part.on_host))
        else:
            index = refs.setdefault(part.ref, len(refs))
            sources.append(PartSource(index, part.leaf_index, None, part.place, part.on_host, part.nest))
    return tuple(sources)


def require_parts(values: Sequence[PerReplica], num_replicas: int) -> None:
    """Raise if one of `values` has parts for another number of replicas: superfluous parts would be lost silently."""
    for value in values:
        if value.num_parts != num_replicas:
            raise InvalidArgumentError(
                f"A PerReplica argument must have a value for each of the {num_replicas} replicas, got one with "
                f"{value.num_parts}. Is it another strategy's? Distribute the dataset, or make the values, with the "
                "strategy that runs the step."
            )


def batch_rows(values: Sequence[PerReplica]) -> tuple[int, ...] | None:
    """Return the rows per replica of the first distributed batch among `values`; None without one."""
    return next((value.rows for value in values if value.rows is not None), None)


def _keep(part: Any) -> Any:
    return part


class _Results(Protocol):
    """Leaves that steps returned."""

    def require(self, nest: str, place: int) -> None:
        """Raise if the result of the step at `place` has another structure than `nest`."""


def resolve_parts(
    sources: Sequence[PartSource], objects: Sequence[Leaves], move: Callable[[Any], Any] = _keep
) -> list[Any]:
    """Return this replica's values of the PerReplica arguments, moved by `move`; a repeated leaf is the same tensor."""
    seen: dict[tuple[int, int, int, bool], Any] = {}
    parts = []
    for source in sources:
        moved = _keep if source.on_host else move
        if source.object_index is None:
            parts.append(moved(source.value))
            continue
        key = (source.object_index, source.leaf_index, source.place, source.on_host)
        if source.nest:
            cast("_Results", objects[source.object_index]).require(source.nest, source.place)
        if key not in seen:
            seen[key] = moved(objects[source.object_index].leaf(source.leaf_index, source.place))
        parts.append(seen[key])
    return parts


@final
class StepHeaders:
    """The headers and numbers of a strategy's steps."""

    def __init__(self) -> None:
        self.count = 0  # number of steps so far
        self.looked = False  # True if a step had an `on_nonfinite` other than "pass"
        self._random_restored = 0

    def following(
        self,
        payload: StepPayload,
        options: RunOptions,
        gradient_reduce_op: ReduceOp,
        *,
        generation: int,
        summaries: SummaryOrder | None,
    ) -> StepHeader:
        """Return the header of the next step."""
        self.count += 1
        self.looked |= options.on_nonfinite != "pass"
        return StepHeader(
            step=self.count - 1,
            generation=generation,
            payload=payload.without_parts(),
            rows=batch_rows(payload.per_replica),
            gradient_reduce_op=gradient_reduce_op,
            padding=options.empty_batch == "pad",
            param_sync_every=options.param_sync_every,
            on_nonfinite=options.on_nonfinite,
            seed=(torch.initial_seed(), num_seed_calls()),
            summaries=summaries,
            random=self._restored_random(),
            modes=TorchModes.here(),
        )

    def _restored_random(self) -> tuple[tuple[bytes, ...], ...]:
        states = RESTORED_REPLICAS.since(self._random_restored)
        self._random_restored = RESTORED_REPLICAS.count
        return states
