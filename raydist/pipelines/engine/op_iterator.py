"""One pass over an operation.

Iterators pull *blocks* (see `elements/blocks.py`) and pass the wanted number of elements down: `next_block(limit)`
returns between 1 and `limit` elements. Because nobody receives more than was asked for, most iterators keep nothing
between two calls, and the state of a whole pipeline is a handful of integers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from raydist.errors import CancelledError, DeadlineExceededError, UnavailableError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState

__all__ = ["MACHINERY_ERRORS", "ClosesInput", "OpIterator"]

MACHINERY_ERRORS = (UnavailableError, DeadlineExceededError, CancelledError)
"""Errors of what runs a pipeline, not of an element: they end the iteration, and no element takes their place."""


class OpIterator(ABC):
    """One pass over an operation. Used by one thread at a time."""

    @abstractmethod
    def next_block(self, limit: int) -> Block:
        """The next 1 .. `limit` elements.

        Raises:
            StopIteration: No element is left.
            Exception: The error of the element at this place. The iterator stays usable and goes on after it.
        """

    def next_blocks(self, limit: int) -> list[Block]:
        """The next 1 .. `limit` elements, in blocks that lie ready together. Errors as those of `next_block`.

        Large elements are blocks of their own, and a call of each iterator for every one would be the larger cost.
        """
        return [self.next_block(limit)]

    def has_ready(self) -> bool:
        """Whether `next_block` would not wait for a thread. One that was not asked yet begins to work."""
        return True

    @abstractmethod
    def state_dict(self) -> IteratorState:
        """State after the elements and errors handed out so far.

        An iterator that holds a rest (a read-ahead, elements that follow an error) answers with the state before that
        rest and the number of items handed out since: see `resume.py`.
        """

    @abstractmethod
    def load_state_dict(self, state: IteratorState) -> None:
        """Continue where `state` was taken. Called on a fresh iterator, before its first block."""

    def close(self) -> None:  # noqa: B027 - most iterators hold nothing to close
        """Stop threads and release what this iterator and its inputs hold. May be called twice."""


class ClosesInput:
    """For what reads one input (an iterator, a producer) and owns it: closing closes the input."""

    _source: OpIterator

    @final
    def close(self) -> None:
        """Close the input. May be called twice."""
        self._source.close()
