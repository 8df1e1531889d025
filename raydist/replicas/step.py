"""What travels with one dispatched step: made by the driver, one header a replica, and read by the replicas. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast, final

import torch

from raydist.checkpoints.loops.orders import LoopOrder
from raydist.checkpoints.random_state import RESTORED_REPLICAS
from raydist.collectives.delegating import RootReduction
from raydist.context.seed_calls import num_seed_calls
from raydist.errors import InvalidArgumentError
from raydist.mirroring.shipment import Shipment
from raydist.options import RunOptions
from raydist.pickling.by_fields import by_fields
from raydist.replicas.rules import ReplicaRules
from raydist.summaries.order import SummaryOrder
from raydist.torch_modes import TorchModes
from raydist.values import Leaves, PerReplica, ReduceOp

__all__ = [
    "PartSource",
    "ReplicaSetup",
    "StepHeader",
    "StepHeaders",
    "address_parts",
    "batch_rows",
    "require_parts",
    "resolve_parts",
]


@final
@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """What a replica is, fixed when its actor starts.

    Attributes:
        name: The strategy's unique name.
        rank: This replica, 0 .. world_size - 1; of workers, which have no peers, the worker's number.
        world_size: All replicas.
        device: Its `torch.device` name, as its own process sees it.
        worker_devices: The names of all replicas' devices, for the user.
        num_threads: Threads for torch's operators.
        collective_timeout_s: How long a collective may wait for the slowest replica.
        bucket_bytes: Size of one gradient bucket.
        backend: Name of the collective backend; "auto" for the device's default.
        compression: The type in which gradients travel: "fp16", "bf16", or None for their own.
        worker: Which of the strategy's workers (nodes) it belongs to, 0 .. num_workers - 1.
        host: The name of its node, for messages; empty where nobody knows.
        rules: What it does beyond running steps.
        accumulation: Which replica adds up for all, and how; None where each does its share.
    """

    name: str
    rank: int
    world_size: int
    device: str
    worker_devices: tuple[str, ...]
    num_threads: int
    collective_timeout_s: float
    bucket_bytes: int
    backend: str = "auto"
    compression: Literal["fp16", "bf16"] | None = None
    worker: int = 0
    host: str = ""
    rules: ReplicaRules = field(default_factory=ReplicaRules)
    accumulation: RootReduction | None = None


@final
@dataclass(frozen=True, slots=True)
class PartSource:
    """Where a replica finds its part of one PerReplica argument.

    Attributes:
        object_index: Which of the step's object arguments holds it; None if `value` is it.
        leaf_index: Which leaf of that object.
        value: The part itself, for values that came from the driver.
        place: Which of the steps that the object holds.
        on_host: It is not moved to the replica's device.
        nest: What the object, results of steps, must hold there, as a `Structure` is shown; empty where that is known.
    """

    object_index: int | None
    leaf_index: int = 0
    value: Any = None
    place: int = 0
    on_host: bool = False
    nest: str = ""

    __reduce__ = by_fields


@final
@dataclass(slots=True)  # not frozen, though nobody changes one: that takes twice as long to be read, in every step
class StepHeader:
    """One step for one replica. Objects of the store travel beside it, as arguments that Ray maps.

    Attributes:
        step: Number of the step, counted by the strategy.
        generation: Of the group; a replica refuses steps of another one.
        shipment: The function, its plain arguments and what the driver changed.
        sources: Where the PerReplica arguments are, in the shipment's order.
        rows: Rows of the first distributed batch among the arguments on each replica; None without one.
        gradient_reduce_op: MEAN (by rows) or SUM.
        stand_in: Replicas without rows run on others' rows and nothing they produce counts; else on zero rows.
        seed: The driver's torch seed, and how often it was set: a change of either reseeds the replica.
        check_in_sync: After how many batches replicas compare what they trained; 0 for never.
        on_nonfinite: What a NaN or an infinity in a gradient does; see `RunOptions`.
        summaries: What `rd.summary` does where the driver called `run`; None for nothing of its own.
        random: What each replica's random generator goes on from; nothing where it goes on by itself.
        looks_only: The function only looks at what replicas hold: for rules and checks it is no step.
        loop: Its draws are boundaries between steps, for these; None where they are not, or it does not draw.
        modes: Where the driver had left torch's defaults when it called `run`; None where it had not.
    """

    step: int
    generation: int
    shipment: Shipment
    sources: tuple[PartSource, ...] = ()
    rows: tuple[int, ...] | None = None
    gradient_reduce_op: ReduceOp = ReduceOp.MEAN
    stand_in: bool = True
    seed: tuple[int, int] = (0, 0)
    check_in_sync: int = 0
    on_nonfinite: Literal["pass", "raise", "skip"] = "pass"
    summaries: SummaryOrder | None = None
    random: tuple[tuple[bytes, ...], ...] = ()
    looks_only: bool = False
    loop: LoopOrder | None = None
    modes: TorchModes | None = None

    __reduce__ = by_fields

    def addressed(self, sources: tuple[PartSource, ...]) -> StepHeader:
        """The same step for one replica, which finds its parts there."""
        return replace(self, sources=sources) if sources != self.sources else self

    def stands_in(self, rank: int) -> bool:
        """Whether a replica has no rows of the first batch, and works on others' rows: nothing it produces counts.

        Where no replica has rows nobody works on others': the step is run as on one device.
        """
        return self.stand_in and self.rows is not None and self.rows[rank] == 0 and any(self.rows)

    def in_group(self, generation: int, sources: tuple[PartSource, ...]) -> StepHeader:
        """The same step for a replica of this generation, which finds its parts there."""
        return replace(self, generation=generation, sources=sources)


def address_parts(
    values: Sequence[PerReplica], rank: int, *, stand_in: bool, refs: dict[Any, int]
) -> tuple[PartSource, ...]:
    """Where replica `rank` finds its parts of `values`.

    Args:
        values: The PerReplica arguments of one step.
        rank: The replica.
        stand_in: A replica without rows is to work on other rows.
        refs: The object refs that will be sent along, each with its place among them; those missing are added.
    """
    sources = []
    for value in values:
        part = value.part_on(rank, stand_in=stand_in)
        if part.ref is None:
            sources.append(PartSource(None, value=part.value, on_host=part.on_host))
        else:
            index = refs.setdefault(part.ref, len(refs))
            sources.append(PartSource(index, part.leaf_index, None, part.place, part.on_host, part.nest))
    return tuple(sources)


def require_parts(values: Sequence[PerReplica], num_replicas: int) -> None:
    """Raise where one of `values` is not of this many replicas: parts that nobody asks for would be lost silently.

    Raises:
        InvalidArgumentError: It is of more, or fewer: another strategy's.
    """
    for value in values:
        if value.num_parts != num_replicas:
            raise InvalidArgumentError(
                f"A PerReplica argument must have a value for each of the {num_replicas} replicas, got one with "
                f"{value.num_parts}. Is it another strategy's? Distribute the dataset, or make the values, with the "
                "strategy that runs the step."
            )


def batch_rows(values: Sequence[PerReplica]) -> tuple[int, ...] | None:
    """Rows per replica of the first distributed batch among `values`; None without one."""
    return next((value.rows for value in values if value.rows is not None), None)


def _keep(part: Any) -> Any:
    return part


class _Results(Protocol):
    """Leaves that steps returned."""

    def require(self, nest: str, place: int) -> None:
        """Raise where those of one step are not this nest."""


def resolve_parts(
    sources: Sequence[PartSource], objects: Sequence[Leaves], move: Callable[[Any], Any] = _keep
) -> list[Any]:
    """This replica's values of the PerReplica arguments, moved by `move`; one leaf given twice is one tensor."""
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
    """Numbers the steps of a strategy.

    Attributes:
        count: How many there were.
        looked: Whether some step did something about gradients that are not finite.
    """

    def __init__(self) -> None:
        self.count = 0
        self.looked = False
        self._random_restored = 0

    def following(
        self,
        shipment: Shipment,
        options: RunOptions,
        gradient_reduce_op: ReduceOp,
        *,
        generation: int,
        summaries: SummaryOrder | None,
    ) -> StepHeader:
        """The header of the next step.

        Args:
            shipment: What it needs.
            options: How it is run.
            gradient_reduce_op: How gradients meet.
            generation: Of the group.
            summaries: Where what it shows is written; None: nowhere.
        """
        self.count += 1
        self.looked |= options.on_nonfinite != "pass"
        return StepHeader(
            step=self.count - 1,
            generation=generation,
            shipment=shipment.without_parts(),
            rows=batch_rows(shipment.per_replica),
            gradient_reduce_op=gradient_reduce_op,
            stand_in=options.empty_batch == "stand_in",
            check_in_sync=options.check_in_sync,
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
