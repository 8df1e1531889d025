"""Conversion of elements to training steps: the part of each replica, step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

from raydist.core.exception_utils import LEAVING
from raydist.core.nest import LEAF, Structure
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import Column, RemoteColumn
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.saved_state import counts_in, state_errors
from raydist.pipelines.metering.stats import PipelineStats
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.joined_states import join_states, split_state
from raydist.pipelines.run.split import Cut, SplitRule, common_rows, cut_batch, deal, piece_sizes, rows_behind

Element = tuple[Sequence[Any], Structure]
"""The leaves of an element, and their nest."""


def element_views(block: Block) -> list[Element]:
    """Return the elements of a block without copies (the conversion of a `DatasetIterator`).

    A leaf of row ids is a `RemoteColumn` of the element's rows.
    """
    if block.holds_datasets:
        block.of_tensors("a distributed dataset")
    # A 0-d view, not a numpy scalar: later code cuts and stores arrays.
    columns = [_elements(column) for column in block.columns]
    return [([column[row] for column in columns], block.structure) for row in range(block.num_rows)]


def _elements(column: Column) -> Any:
    if isinstance(column, RemoteColumn):
        return [column.element(row) for row in range(len(column))]
    return column if column.dtype == object else [column[row, ...] for row in range(len(column))]


class StepSource(ABC):
    """An iterator over steps. Only one thread may use it at a time."""

    def __init__(self, iterators: Sequence[DatasetIterator[Element]], num_replicas: int) -> None:
        self._iterators = tuple(iterators)
        self._num_replicas = num_replicas
        self.structure: Structure = LEAF
        """The nest of the last step."""
        self.step = 0
        """Index of the next step in its epoch; errors in place of steps count."""

    @final
    def next_step(self) -> tuple[Cut, ...]:
        """Return one cut per replica. Blocks until the step is ready.

        Raises:
            StopIteration: No replica has data left.
            Exception: The error in place of this step. The source continues after it.
        """
        step = self.step
        try:
            return self._make_step(step)
        finally:
            self.step = step + 1

    @abstractmethod
    def _make_step(self, step: int) -> tuple[Cut, ...]:
        """Return the cuts of one step; see `next_step`."""

    @final
    def has_ready(self) -> bool:
        """Return True if the elements of the next step have been made."""
        return all(iterator.has_ready() for iterator in self._iterators)

    @final
    def state_dict(self) -> IteratorState:
        """Return the state after the steps and errors handed out so far."""
        return {**self._position(), "step": self.step}

    def _position(self) -> IteratorState:
        """Return the joined state of the iterators."""
        return join_states([iterator.state_dict() for iterator in self._iterators])

    @final
    def load_state_dict(self, state: IteratorState) -> None:
        """Continue at `state`, taken by a step source or by a plain iterator over the same pipeline."""
        states = split_state(state, len(self._iterators))
        with state_errors():
            self._go_to(states)
            self.step = int(state.get("step", 0))

    def _go_to(self, states: Sequence[IteratorState]) -> None:
        """Load the state of each iterator."""
        for iterator, its_state in zip(self._iterators, states, strict=True):
            iterator.load_state_dict(its_state)

    @final
    def stats(self) -> PipelineStats:
        """Return the statistics of the stages of the first pipeline. Any thread may call this."""
        return self._iterators[0].stats()

    @final
    def close(self) -> None:
        """Close the iterators."""
        for iterator in self._iterators:
            iterator.close()


@final
class GlobalBatches(StepSource):
    """Steps from global batches, which `rule` splits into pieces."""

    def __init__(self, iterator: DatasetIterator[Element], num_replicas: int, rule: SplitRule) -> None:
        super().__init__([iterator], num_replicas)
        self._rule = rule

    def _make_step(self, step: int) -> tuple[Cut, ...]:
        leaves, structure = next(self._iterators[0])
        cuts, self.structure = cut_batch(
            leaves, num_replicas=self._num_replicas, rule=self._rule, step=step, structure=structure
        )
        return cuts


@final
class DealtElements(StepSource):
    """Steps of whole elements, one per replica: from one iterator in turn, or from one iterator per replica.

    An error takes the place of the whole step, as for a whole batch.
    """

    def _make_step(self, step: int) -> tuple[Cut, ...]:
        dealt: list[Sequence[Any] | None] = []
        structure = self.structure
        failure: BaseException | None = None
        for replica in range(self._num_replicas):
            try:
                leaves, structure = next(self._iterators[replica % len(self._iterators)])
                dealt.append(leaves)
            except StopIteration:
                dealt.append(None)
            except LEAVING:
                raise
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure
        if not any(leaves is not None for leaves in dealt):
            raise StopIteration
        cuts, self.structure = deal(dealt, structure)
        return cuts


_MOST_PIECES = 1 << 16  # limit for a loaded state: cutting the batch again makes some objects per piece

_Dealt = list[int]
"""Number of pieces of a batch that were handed out, and number of pieces into which it was cut."""


@final
class WorkerBatches(StepSource):
    """Steps from the batches of this worker.

    In the middle of a batch, the state is the state before the batch, and the number of pieces handed out. With another
    number of replicas on the same number of workers, the remaining rows are cut again.
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
