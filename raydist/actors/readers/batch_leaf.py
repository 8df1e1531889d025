"""The leaves of a distributed batch on the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from raydist.values import Part, PerReplica

if TYPE_CHECKING:
    from raydist.actors.passes.batch_group import StepBatch
    from raydist.actors.passes.link import PipelineLink

__all__ = ["BatchLeaf"]


@final
class BatchLeaf(PerReplica):
    """One leaf of a distributed batch. The parts are in the object store, and replicas map them from there."""

    def __init__(self, batch: StepBatch, index: int, link: PipelineLink) -> None:
        super().__init__(())
        self._values = None
        self.batch = batch
        self.index = index
        self.rows = batch.rows
        self._link = link

    @property
    def num_parts(self) -> int:
        return len(self.batch.group.refs)

    def part_on(self, rank: int, *, stand_in: bool = False) -> Part:
        batch = self.batch
        place = batch.place_on(rank, stand_in=stand_in)
        return Part(ref=batch.group.refs[rank], leaf_index=self.index, place=place, on_host=self._link.on_host)

    def _fetch(self) -> tuple[Any, ...]:
        batch = self.batch
        places = [batch.place_on(rank, stand_in=False) for rank in range(self.num_parts)]
        pieces = map(self._link.fetch, batch.group.refs)
        return tuple(piece.leaf(self.index, place) for piece, place in zip(pieces, places, strict=True))
