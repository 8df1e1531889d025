"""The ways to ask an iterator of batches for the next one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Self, final

from raydist.errors import OutOfRangeError
from raydist.pipelines.run.iterator import Optional

__all__ = ["BatchIterator"]


class BatchIterator(Iterator[Any]):
    """One pass over a distributed dataset; read it from one thread."""

    @final
    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> Any:
        """The next batch. Waits up to `Timeouts.input_s`.

        Raises:
            StopIteration: The data has ended.
            Exception: The error of the batch at this place, with its type; iteration goes on after it.
            UnavailableError: The input pipeline or one of its workers is gone; names it.
        """

    @final
    def get_next(self) -> Any:
        """Like `next`, but raises OutOfRangeError at the end (tf.data.Iterator.get_next)."""
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(
                "The distributed dataset has no further batch. Take a new iterator: iter(dataset)."
            ) from None

    @final
    def get_next_as_optional(self) -> Optional[Any]:
        """The next batch, or an empty Optional at the end (tf.data.Iterator.get_next_as_optional)."""
        try:
            return Optional.from_value(next(self))
        except StopIteration:
            return Optional.empty()
