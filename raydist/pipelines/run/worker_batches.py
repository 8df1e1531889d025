"""Steps of one of several workers that read their own batches: each worker reads a shard of the files, or all.

A worker cuts each of its batches into a piece for every replica of all workers. It hands these pieces to its own
replicas, one each per step. So the replicas of all workers together process about one batch per step.
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

_MOST_PIECES = 1 << 16  # limit for a loaded state: cutting the batch again makes some objects per piece

_Dealt = list[int]
"""Number of pieces of a batch that were handed out, and number of pieces into which it was cut."""


@final
class WorkerBatches(StepSource):
    """Steps from the batches of this worker.

    In the middle of a batch, the state is the state before the batch, and the number of pieces handed out. With another
    number of replicas on the same number of workers, the remaining rows are cut again.

    Args:
        iterator: Iterator over the batches.
        num_replicas: Number of replicas of this worker.
        num_pieces: Number of replicas of all workers.
        rule: Rule for cuts; "balanced" uses the number of the batch.
    """

    def __init__(self, iterator: DatasetIterator[Element], num_replicas: int, num_pieces: int, rule: SplitRule) -> None:
        super().__init__([iterator], num_replicas)
        self._num_pieces = num_pieces
        self._rule = rule
        self._batch = 0  # number of the next batch
        self._pieces: tuple[Cut, ...] = ()  # remaining pieces of the last batch
        self._in_front: IteratorState = {}  # state before the last batch
        self._dealt: list[_Dealt] = []  # pieces of the last batch that were handed out with earlier cuts
        self._resumed: list[_Dealt] = []  # the same for the next batch, from a state

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
