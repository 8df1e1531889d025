"""The ways to ask an iterator of batches for the next one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Self, final

from raydist.errors import OutOfRangeError
from raydist.pipelines.run.optional import Optional

__all__ = ["BatchIterator"]


class BatchIterator(Iterator[Any]):
    """One pass over a distributed dataset. Threads may share it: each batch goes to exactly one of them."""

    @final
    def __iter__(self) -> Self:
        """Itself: an iterator is one pass.

        >>> iterator = iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(2).batch(1)))
        >>> iter(iterator) is iterator
        True
        """
        return self

    @abstractmethod
    def __next__(self) -> Any:
        """The next batch. Waits up to `Timeouts.input_s`.

        Returns:
            A nest as the dataset's elements are: its leaves have one part per replica.

        Raises:
            StopIteration: The data has ended.
            Exception: The error of the batch at this place, with its type; iteration goes on after it.
            DeadlineExceededError: The batch did not come in time.
            FailedPreconditionError: The iterator was closed.
            UnavailableError: The input pipeline or one of its workers is gone; names it.
        """

    @final
    def get_next(self) -> Any:
        """The next batch, for loops that are not `for`. Waits and raises as `next` does, but at the end.

        Returns:
            The batch: a nest whose leaves have one part per replica.

        Raises:
            OutOfRangeError: The data has ended.

        >>> iterator = iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(2).batch(2)))
        >>> iterator.get_next()
        tensor([0, 1])

        Source: tf.distribute.DistributedIterator, tf.data.Iterator.get_next.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(
                "The distributed dataset has no further batch. Take a new iterator: iter(dataset)."
            ) from None

    @final
    def get_next_as_optional(self) -> Optional[Any]:
        """The next batch, or an empty Optional at the end, so that no exception is needed. Waits as `next` does.

        Returns:
            An :class:`Optional`: `has_value()` tells whether there is a batch, `get_value()` gives it.

        >>> iterator = iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(2).batch(2)))
        >>> [iterator.get_next_as_optional().has_value() for _ in range(2)]
        [True, False]

        Source: tf.distribute.DistributedIterator.get_next_as_optional.
        """
        try:
            return Optional.from_value(next(self))
        except StopIteration:
            return Optional.empty()
