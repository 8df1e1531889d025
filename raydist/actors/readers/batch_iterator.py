"""The base class of iterators over batches, with the methods that return the next batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Self, final

from raydist.core.errors import OutOfRangeError
from raydist.pipelines.run.optional import Optional


class BatchIterator(Iterator[Any]):
    """One epoch of a distributed dataset. Threads may share the iterator: each batch goes to exactly one thread."""

    @final
    def __iter__(self) -> Self:
        """Return the iterator itself.

        >>> iterator = iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(2).batch(1)))
        >>> iter(iterator) is iterator
        True
        """
        return self

    @abstractmethod
    def __next__(self) -> Any:
        """Return the next batch. Blocks for at most `Timeouts.input_s`.

        Returns:
            A nest with the structure of the dataset's elements; each leaf has one part per replica.

        Raises:
            StopIteration: The data has ended.
            Exception: The error of this batch, with its type; the next call returns the batch after it.
            DeadlineExceededError: The batch did not come in time.
            FailedPreconditionError: The iterator was closed.
            UnavailableError: The input pipeline or one of its workers is gone; the message names the process.
        """

    @final
    def get_next(self) -> Any:
        """Return the next batch, for loops other than `for`. Blocks and raises as `next` does, except at the end.

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
        """Return the next batch as an Optional, which is empty at the end. Blocks as `next` does.

        Returns:
            An :class:`Optional`: `has_value()` is True if there is a batch, and `get_value()` returns it.

        >>> iterator = iter(rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(2).batch(2)))
        >>> [iterator.get_next_as_optional().has_value() for _ in range(2)]
        [True, False]

        Source: tf.distribute.DistributedIterator.get_next_as_optional.
        """
        try:
            return Optional.from_value(next(self))
        except StopIteration:
            return Optional.empty()
