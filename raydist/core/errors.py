"""Exceptions that raydist raises.

The tree (each also derives from the builtin in brackets, so that ordinary `except` clauses work)::

    RaydistError
    +-- InvalidArgumentError [ValueError]       an argument is out of its range; nothing was started
    +-- SpecError [TypeError]                   elements differ in structure, dtype or shape
    +-- OutOfRangeError                         the end of a dataset
    +-- DataLossError                           a corrupt or truncated file
    +-- NotFoundError [FileNotFoundError]       a file or a name that does not exist
    +-- FailedPreconditionError                 the right call at the wrong time
    +-- UnavailableError                        a process or a machine is gone
    +-- DeadlineExceededError [TimeoutError]    a wait reached its limit
    +-- CancelledError                          work given up because other work failed
    +-- CollectiveMismatchError                 replicas called different collectives or shapes

`Preempted` is not a `RaydistError`: it is a SystemExit, because the process must end. A message says what must hold,
what was found, and what to do. All errors keep their type, message, fields and notes when they are pickled between
processes.
"""

from __future__ import annotations

from typing import Any, final

__all__ = [
    "CancelledError",
    "CollectiveMismatchError",
    "DataLossError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InvalidArgumentError",
    "NotFoundError",
    "OutOfRangeError",
    "Preempted",
    "RaydistError",
    "SpecError",
    "UnavailableError",
]


class RaydistError(Exception):
    """Base of every error of raydist.

    Args:
        message: The condition that must hold, the value found, and what to do.

    Attributes:
        message: The message without the notes that name the operation, the element and the worker.

    >>> import pickle
    >>> error = InvalidArgumentError("batch_size must be >= 1, got 0.")
    >>> pickle.loads(pickle.dumps(error))
    InvalidArgumentError('batch_size must be >= 1, got 0.')

    Source: raydist's own; tf.errors.OpError.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        # FileNotFoundError and TimeoutError derive from OSError, whose __str__ formats errno.
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(cls: type[RaydistError], message: str, fields: dict[str, Any]) -> RaydistError:
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error


@final
class InvalidArgumentError(RaydistError, ValueError):
    """An argument is outside the allowed range; nothing was started and nothing was lost. Also a `ValueError`.

    >>> rd.Dataset.range(3).batch(0)
    Traceback (most recent call last):
    raydist.core.errors.InvalidArgumentError: batch_size must be >= 1, got 0.

    Source: tf.errors.InvalidArgumentError.
    """


@final
class SpecError(RaydistError, TypeError):
    """Elements that must agree differ in structure, dtype or shape; the message shows both. Also a `TypeError`.

    >>> rd.Dataset.range(3).concatenate(rd.Dataset.from_tensors("a")).element_spec  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    raydist.core.errors.SpecError: The datasets must have one structure and dtype, got ...

    Source: raydist's own; TensorFlow raises TypeError and ValueError.
    """


@final
class OutOfRangeError(RaydistError):
    """The dataset has no further element.

    >>> iter(rd.Dataset.range(0)).get_next()
    Traceback (most recent call last):
    raydist.core.errors.OutOfRangeError: The dataset has ended. Take a new iterator with iter(dataset).

    Source: tf.errors.OutOfRangeError.
    """


@final
class DataLossError(RaydistError):
    """A file is corrupt or truncated.

    Args:
        message: See :class:`RaydistError`.
        path: Path of the file.
        offset: Byte offset of the record that cannot be read.

    Attributes:
        path: Path of the file, as the program gave it.
        offset: Byte offset of the record that cannot be read, or None if the format has no offsets.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "x.tfrecord")
    >>> with open(path, "wb") as file:
    ...     _ = file.write(b"damaged")
    >>> try:
    ...     next(iter(rd.TFRecordDataset(path)))
    ... except rd.DataLossError as error:
    ...     print(error.path == path, error.offset)
    True 0

    Source: tf.errors.DataLossError.
    """

    def __init__(self, message: str = "", *, path: str | None = None, offset: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset


@final
class NotFoundError(RaydistError, FileNotFoundError):
    """A file, a pattern or a name that does not exist. Also a `FileNotFoundError`.

    >>> rd.Dataset.list_files("/nowhere/*.txt")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    raydist.core.errors.NotFoundError: At least one file must match, but none matches '/nowhere/*.txt'. ...

    Source: tf.errors.NotFoundError.
    """


@final
class FailedPreconditionError(RaydistError):
    """A call that is not allowed in the present state: a closed strategy, a module made outside the scope, ...

    >>> iterator = iter(rd.Dataset.range(3))
    >>> iterator.close()
    >>> next(iterator)
    Traceback (most recent call last):
    raydist.core.errors.FailedPreconditionError: This iterator is closed. Take a new one with iter(dataset).

    Source: tf.errors.FailedPreconditionError.
    """


@final
class UnavailableError(RaydistError):
    """A process or a machine is gone; the message names it.

    Args:
        message: See :class:`RaydistError`.
        actor: Name of the actor that died.

    Attributes:
        actor: Name of the actor that died, if it is known.

    >>> UnavailableError("Replica 1 is gone.", actor="replica-1").actor
    'replica-1'

    Source: tf.errors.UnavailableError.
    """

    def __init__(self, message: str = "", *, actor: str | None = None) -> None:
        super().__init__(message)
        self.actor = actor


@final
class DeadlineExceededError(RaydistError, TimeoutError):
    """A wait reached its limit (see `rd.Timeouts`). Also a `TimeoutError`.

    The message names the process that did not answer, and the limit to raise.

    >>> try:
    ...     raise DeadlineExceededError("Replica 1 must answer within 10 s. Raise Timeouts.close_s.")
    ... except TimeoutError as error:
    ...     print(error)
    Replica 1 must answer within 10 s. Raise Timeouts.close_s.

    Source: tf.errors.DeadlineExceededError.
    """


@final
class CancelledError(RaydistError):
    """Work that was given up because other work failed or the owner was closed.

    >>> issubclass(CancelledError, RaydistError)
    True

    Source: tf.errors.CancelledError.
    """


@final
class CollectiveMismatchError(RaydistError):
    """Replicas called different collectives, or the same one with other shapes or dtypes; the message shows all.

    >>> str(CollectiveMismatchError("Replica 0 called all_reduce, replica 1 barrier."))
    'Replica 0 called all_reduce, replica 1 barrier.'

    Source: raydist's own; TensorFlow waits, or says that a collective has inconsistent parameters.
    """


@final
class Preempted(SystemExit):
    """The process must end (SIGTERM, or its node is drained) and has saved a checkpoint; the exit code is `code`.

    A `SystemExit`: if it is not caught, the program ends with that code, and its supervisor can start it again.

    Args:
        code: The exit code.
        message: The reason, and the path of the checkpoint.

    >>> error = Preempted(42, "This process is to end: it received SIGTERM.")
    >>> error.code, str(error)
    (42, 'This process is to end: it received SIGTERM.')

    Source: the exit of tf.distribute.experimental.PreemptionCheckpointHandler, with its exit code.
    """

    def __init__(self, code: int = 42, message: str = "") -> None:
        super().__init__(code)
        self.message = message

    def __str__(self) -> str:
        return self.message or str(self.code)

    def __reduce__(self) -> tuple[Any, ...]:
        return Preempted, (self.code, self.message), self.__dict__
