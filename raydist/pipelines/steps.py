"""From elements to steps: what each replica gets, one step after the other.

The state of a step source is small and says nothing of the number of replicas, so that a step can be resumed on
another number of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

from raydist.nest import LEAF, Structure
from raydist.pipelines.op import OpIterator, State
from raydist.pipelines.split import Cut, SplitRule, cut_batch, deal

__all__ = ["DealtElements", "GlobalBatches", "StepSource"]


class StepSource(ABC):
    """Steps in order. Used by one thread at a time."""

    structure: Structure = LEAF
    """The nest of the last step."""

    @abstractmethod
    def next_step(self) -> tuple[Cut, ...]:
        """One cut per replica.

        Raises:
            StopIteration: No replica would have anything.
            Exception: The error that stands in this step's place. The source goes on after it.
        """

    @abstractmethod
    def state_dict(self) -> list[State]:
        """The states of the iterators, after the steps and errors handed out so far."""

    @abstractmethod
    def close(self) -> None:
        """Close the iterators."""


def _leaves(source: OpIterator) -> tuple[list[Any], Structure]:
    block = source.next_block(1)
    return [column[0] for column in block.columns], block.structure


@final
class GlobalBatches(StepSource):
    """Each element is a global batch, cut into pieces."""

    def __init__(self, source: OpIterator, *, num_replicas: int, rule: SplitRule, step: int) -> None:
        self._source = source
        self._num_replicas = num_replicas
        self._rule = rule
        self._step = step

    def next_step(self) -> tuple[Cut, ...]:
        step = self._step
        self._step += 1  # a step whose place an error takes counts as well
        leaves, self.structure = _leaves(self._source)
        return cut_batch(
            leaves, num_replicas=self._num_replicas, rule=self._rule, step=step, paths=self.structure.paths()
        )

    def state_dict(self) -> list[State]:
        return [self._source.state_dict()]

    def close(self) -> None:
        self._source.close()


@final
class DealtElements(StepSource):
    """Whole elements, one per replica and step: from one iterator in turn, or from one iterator per replica.

    An error takes the place of its whole step, as it takes that of a whole batch.
    """

    def __init__(self, sources: Sequence[OpIterator], *, num_replicas: int) -> None:
        self._sources = tuple(sources)
        self._readers = self._sources * (num_replicas // len(self._sources))

    def next_step(self) -> tuple[Cut, ...]:
        elements: list[list[Any] | None] = []
        failure: Exception | None = None
        for reader in self._readers:
            try:
                leaves, self.structure = _leaves(reader)
                elements.append(leaves)
            except StopIteration:
                elements.append(None)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        if not any(leaves is not None for leaves in elements):
            raise StopIteration
        return deal(elements)

    def state_dict(self) -> list[State]:
        return [source.state_dict() for source in self._sources]

    def close(self) -> None:
        for source in self._sources:
            source.close()
