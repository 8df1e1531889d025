"""One pass over an operation.

Iterators pull *blocks* (see `elements/blocks.py`) and pass the wanted number of elements down: `next_block(limit)`
returns between 1 and `limit` elements. No iterator receives more than it asked for. So most iterators keep nothing
between two calls, and the state of a whole pipeline is a few integers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from raydist.core.errors import CancelledError, DeadlineExceededError, UnavailableError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState

MACHINERY_ERRORS = (UnavailableError, DeadlineExceededError, CancelledError)
"""Errors of the pipeline itself, not of an element: they end the iteration, and no element takes their place."""


class OpIterator(ABC):
    """One pass over an operation. Only one thread may use it at a time."""

    @abstractmethod
    def next_block(self, limit: int) -> Block:
        """Return the next 1 .. `limit` elements.

        Raises:
            StopIteration: No element is left.
            Exception: The error of the element at this place. The iterator continues after that element.
        """

    def has_ready(self) -> bool:
        """Return True if `next_block` would not wait for a thread. The first call may start the threads."""
        return True

    @abstractmethod
    def state_dict(self) -> IteratorState:
        """Return the state after the elements and errors handed out so far.

        An iterator that holds remaining items (a read-ahead, elements after an error) returns the state before these
        items and the number of items handed out since: see `resume.py`.
        """

    @abstractmethod
    def load_state_dict(self, state: IteratorState) -> None:
        """Continue at `state`. Must be called on a fresh iterator, before its first block."""

    def close(self) -> None:  # noqa: B027 - most iterators hold nothing to close
        """Stop threads and release what this iterator and its inputs hold. May be called twice."""


class ClosesInput:
    """Base class of an iterator or producer that owns one input: closing closes the input."""

    _source: OpIterator

    @final
    def close(self) -> None:
        """Close the input. May be called twice."""
        self._source.close()
