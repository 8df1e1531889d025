"""The steps of one of several workers that read batches of their own: shards of files, or everything each.

A worker cuts each of its batches into a piece for every replica of all workers, and deals them to its own replicas,
one each a step. So the replicas of all workers together have about one batch a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from raydist.nest import Structure
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.saved_state import counts_in
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.split import Cut, SplitRule, common_rows, cut_batch, piece_sizes, rows_behind
from raydist.pipelines.run.steps import Element, StepSource

__all__ = ["WorkerBatches"]

_MOST_PIECES = 1 << 16  # that a state may tell of: each is some objects, when the batch is cut again

_Dealt = list[int]
"""Pieces of a batch that were dealt, and into how many it was cut."""


@final
class WorkerBatches(StepSource):
    """Each element is a batch of this worker.

    In the middle of a batch the state is that in front of it, and the number of pieces dealt. On another number of
    replicas of as many workers the rows that are left are cut anew.

    Args:
        iterator: Over the batches.
        num_replicas: Of this worker.
        num_pieces: Replicas of all workers.
        rule: How batches are cut; "balanced" goes by the number of the batch.
    """

    def __init__(self, iterator: DatasetIterator[Element], num_replicas: int, num_pieces: int, rule: SplitRule) -> None:
        super().__init__([iterator], num_replicas)
        self._num_pieces = num_pieces
        self._rule = rule
        self._batch = 0  # number of the next one
        self._pieces: tuple[Cut, ...] = ()  # of the last one, that are left
        self._in_front: IteratorState = {}  # of the last one
        self._dealt: list[_Dealt] = []  # of the last one, as it was cut before
        self._resumed: list[_Dealt] = []  # the same of the next one, from a state

    def _make_step(self, step: int) -> tuple[Cut, ...]:
        while not self._pieces:
            self._pieces = self._next_pieces()
        made, self._pieces = self._pieces[: self._num_replicas], self._pieces[self._num_replicas :]
        return made

    def _next_pieces(self) -> tuple[Cut, ...]:
        (iterator,) = self._iterators
        self._in_front = {**iterator.state_dict(), "batch": self._batch}
        self._batch += 1
        leaves, structure = next(iterator)
        dealt, self._resumed, self._dealt = self._resumed, [], []
        while dealt and not (len(dealt) == 1 and dealt[0][1] == self._num_pieces):
            done, of = dealt.pop(0)
            self._dealt.append([done, of])
            leaves = rows_behind(leaves, sum(self._sizes(leaves, structure, of)[:done]))
        if self._dealt and not common_rows(leaves, structure.paths()):
            return ()
        cuts, self.structure = cut_batch(
            leaves, num_replicas=self._num_pieces, rule=self._rule, step=self._batch - 1, structure=structure
        )
        return cuts[dealt[0][0] if dealt else 0 :]

    def _sizes(self, leaves: Sequence[Any], structure: Structure, num_pieces: int) -> tuple[int, ...]:
        return piece_sizes(common_rows(leaves, structure.paths()), num_pieces, self._rule, self._batch - 1)

    def _position(self) -> IteratorState:
        if self._pieces:
            last = [self._num_pieces - len(self._pieces), self._num_pieces]
            return {**self._in_front, "dealt": [*self._dealt, last]}
        resumed = {"dealt": self._resumed} if self._resumed else {}
        return {**super()._position(), "batch": self._batch, **resumed}

    def _go_to(self, states: Sequence[IteratorState]) -> None:
        super()._go_to(states)
        (state,) = states
        self._batch = int(state["batch"])
        self._resumed = [_checked(entry) for entry in state.get("dealt", [])]
        self._pieces = ()


def _checked(entry: Any) -> _Dealt:
    done, of = counts_in(entry, 2)
    if not 0 <= done <= of or not 0 < of <= _MOST_PIECES:
        raise ValueError(f"so many of so many pieces of a batch must have been dealt, got {entry!r:.100}")
    return [done, of]
