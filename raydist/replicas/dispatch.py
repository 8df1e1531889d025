"""Turns one `run` into one header and one list of objects per replica. Pure: nothing is sent here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from raydist.replicas.step import PartSource, StepHeader
from raydist.values import PerReplica, ReduceOp

__all__ = ["StepPlan", "address_parts", "batch_rows"]


@final
@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step before it is cut into one message per replica; the fields are those of `StepHeader`."""

    step: int
    generation: int
    shipment: Any
    per_replica: tuple[PerReplica, ...]
    rows: tuple[int, ...] | None
    gradient_reduce_op: ReduceOp
    stand_in: bool
    seed: int

    def header(self, rank: int, sources: tuple[PartSource, ...]) -> StepHeader:
        """What replica `rank` is told."""
        return StepHeader(
            step=self.step,
            generation=self.generation,
            shipment=self.shipment,
            sources=sources,
            rows=self.rows,
            gradient_reduce_op=self.gradient_reduce_op,
            stand_in=self.stand_in,
            seed=self.seed,
        )


def address_parts(
    values: Sequence[PerReplica], rank: int, *, stand_in: bool
) -> tuple[tuple[PartSource, ...], tuple[Any, ...]]:
    """Where replica `rank` finds its parts of `values`, and the object refs to send along, each once."""
    refs: list[Any] = []
    places: dict[Any, int] = {}
    sources = []
    for value in values:
        part = value.part_on(rank, stand_in=stand_in)
        if part.ref is None:
            sources.append(PartSource(None, value=part.value))
            continue
        if part.ref not in places:
            places[part.ref] = len(refs)
            refs.append(part.ref)
        sources.append(PartSource(places[part.ref], part.leaf_index))
    return tuple(sources), tuple(refs)


def batch_rows(values: Sequence[PerReplica]) -> tuple[int, ...] | None:
    """Rows per replica of the first distributed batch among `values`; None without one."""
    return next((value.rows for value in values if value.rows is not None), None)
