"""Conversion of elements to training steps: the part of each replica, step by step.

The state of a step source does not depend on the number of replicas, so an epoch can resume on another number. With one
pipeline it is the state of a plain iterator and the index of the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

from raydist.foreign_errors import LEAVING
from raydist.nest import LEAF, Structure
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import Column, RemoteColumn
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.saved_state import state_errors
from raydist.pipelines.metering.stats import PipelineStats
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.joined_states import join_states, split_state
from raydist.pipelines.run.split import Cut, SplitRule, cut_batch, deal

__all__ = ["DealtElements", "Element", "GlobalBatches", "StepSource", "element_views"]

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
    """An iterator over steps. Only one thread may use it at a time.

    Args:
        iterators: One iterator over the only pipeline, or one per replica; made with :func:`element_views`.
        num_replicas: Number of replicas.
    """

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
        with state_errors(state):
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
