"""Per-replica values, reductions and constants that every layer uses."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, final

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.exception_utils import folded

AUTOTUNE = -1
"""Let raydist choose a parallelism or a buffer size (tf.data.AUTOTUNE)."""

INFINITE_CARDINALITY = -1
"""The cardinality of a dataset without an end (tf.data.INFINITE_CARDINALITY)."""

UNKNOWN_CARDINALITY = -2
"""The cardinality of a dataset with an unknown number of elements (tf.data.UNKNOWN_CARDINALITY)."""


@final
class ReduceOp(enum.Enum):
    """Reduction of the values of several replicas to one (tf.distribute.ReduceOp, and more for collectives).

    Attributes:
        SUM: Sum of the values.
        MEAN: Mean of the values; see `strategy.reduce` for the weights.
        MIN: The smallest, element by element.
        MAX: The largest, element by element.
        PRODUCT: Product of the values.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PRODUCT = "PRODUCT"

    # Members are singletons: the hash of Enum, in Python, would slow down every dict lookup.
    __hash__ = object.__hash__

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the op for a `ReduceOp` or its name in any case.

        Args:
            op: "sum", "MEAN", `ReduceOp.MAX`, ...

        Raises:
            InvalidArgumentError: There is no such op.

        >>> ReduceOp.parse("mean")
        <ReduceOp.MEAN: 'MEAN'>
        """
        if isinstance(op, cls):
            return op
        known = _OPS.get(op.upper()) if isinstance(op, str) else None
        if known is None:
            raise InvalidArgumentError(f"A reduction must be one of {', '.join(_OPS)}, got {op!r}.")
        return known


_OPS = {op.value: op for op in ReduceOp}  # a lookup in Enum's own table takes three Python calls


@final
class Replicated:
    """A value in a batch that every replica gets whole: class weights, say, or the edges of a graph.

    Use it as a leaf of a dataset's elements (in the result of a function of `map`, say), or in the arguments of
    `strategy.run`. Steps and plain iteration get the value itself. Functions of later transformations get this object,
    so that the mark is kept. All other leaves of a batch must have equally many rows.

    Args:
        value: In a dataset an array, tensor, number, bytes or str; in arguments of `run` any value.

    Attributes:
        value: The marked value.

    >>> weights = [1.0, 2.0, 3.0]
    >>> ds = rd.Dataset.range(4).batch(4).map(lambda x: {"x": x, "weights": rd.Replicated(weights)})
    >>> next(iter(ds))["weights"]
    tensor([1., 2., 3.])

    Source: a plain (not distributed) argument of tf.distribute.Strategy.run.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Replicated({self.value!r})"


class Leaves(Protocol):
    """Storage of one replica's part of a nest: one object whose leaves are read by index.

    An object may hold the parts of several steps, each at its position.
    """

    absent: bool
    """True for the results of a replica without rows: reductions skip them."""

    def leaf(self, index: int, place: int = 0) -> Any:
        """Return leaf `index` of the part at `place`, as the user sees it (a torch tensor, a number, ...)."""


@final
@dataclass(frozen=True, slots=True)
class Part:
    """Location of one replica's value of a PerReplica: a leaf of the `Leaves` stored as `ref`, or `value`.

    Attributes:
        ref: Reference of the stored object; None for `value`.
        leaf_index: Index of the leaf.
        value: The value itself.
        place: Position of the step in the object.
        on_host: True if the value stays in host memory, whatever the replica's device.
        nest: The expected structure as a string; empty if the structure is known.
    """

    ref: Any = None
    leaf_index: int = 0
    value: Any = None
    place: int = 0
    on_host: bool = False
    nest: str = ""


_ONE_FOR_EACH = (
    "A PerReplica holds one value per replica. Use strategy.reduce(rd.ReduceOp.MEAN, value), or "
    "strategy.local_results(value) for the single values."
)


class NoNumber(ABC):
    """An object that holds a value and is not the value: arithmetic raises an error that says how to read it."""

    @staticmethod
    @abstractmethod
    def _refusal() -> str:
        """Return the message of the error: the object is not a number, and what to do."""

    def _refuse(self, *_: object) -> NoReturn:
        raise InvalidArgumentError(self._refusal())

    __bool__ = __int__ = __float__ = __complex__ = __round__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __pos__ = __abs__ = _refuse


class PerReplica(NoNumber):
    """One value per replica: a leaf of a distributed batch or of the result of `strategy.run`.

    The values may still be computed; reading :attr:`values` and printing wait for them. A PerReplica is not a number:
    use `strategy.reduce`, or `strategy.local_results` for the single values.

    Args:
        values: One value per replica, in rank order.

    Source: tf.distribute.DistributedValues, PerReplica.

    >>> PerReplica([1, 2]).values
    (1, 2)
    """

    __nest_leaf__ = True

    def __init__(self, values: Sequence[Any]) -> None:
        self._values: tuple[Any, ...] | None = tuple(values)

    @property
    def rows(self) -> tuple[int, ...] | None:
        """Rows on each replica, for a leaf of a distributed batch; else None."""
        return None

    @property
    @folded
    def values(self) -> tuple[Any, ...]:
        """The values in replica order, fetched at the first read.

        Blocks until all values are there; raises the error of a step. Results of replicas without rows are left out.
        """
        if self._values is None:
            self._values = self._fetch()
        return self._values

    @property
    def num_parts(self) -> int:
        """Number of replicas that have a part of this value; does not block."""
        return len(self.values)

    @property
    def weights(self) -> tuple[int, ...] | None:
        """Weight of each of :attr:`values` in a mean over replicas; None for equal weights.

        For results of a step, the rows of each replica. Blocks until the step ends.

        >>> PerReplica([1, 2]).weights is None
        True
        """
        return None

    def part_on(self, rank: int, *, padding: bool = False) -> Part:
        """Return the location of one replica's value. Does not block if the value is on a replica.

        Args:
            rank: Rank of the replica, from 0.
            padding: True for a replica without rows, which gets padding rows.

        >>> PerReplica(["a", "b"]).part_on(1).value
        'b'
        """
        return Part(value=self.values[rank])

    def _fetch(self) -> tuple[Any, ...]:
        raise FailedPreconditionError("raydist bug: a PerReplica without values must know how to fetch them.")

    def _ranks(self) -> Sequence[int]:
        """Return the rank of each of the values."""
        return range(len(self.values))

    @folded
    def __repr__(self) -> str:
        values = self.values  # blocks: printing reads the values
        inner = ", ".join(f"{rank}: {value!r}" for rank, value in zip(self._ranks(), values, strict=True))
        return f"PerReplica({inner})"

    @folded
    def __getattr__(self, name: str) -> Any:
        found = getattr(type(self), name, None)
        if isinstance(found, property):  # the property raised: an AttributeError of a step, say
            return found.__get__(self)
        hint = "" if name.startswith("_") else f" {_ONE_FOR_EACH}"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.{hint}", name=name, obj=self)

    @staticmethod
    def _refusal() -> str:
        return f"{_ONE_FOR_EACH} It is no number and has no truth value."

    @folded
    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else str(self)

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> NoReturn:
        """Raise when a torch function gets a PerReplica in place of a tensor."""
        raise InvalidArgumentError(f"{_ONE_FOR_EACH} {getattr(function, '__name__', function)} of torch takes tensors.")


@final
@dataclass(frozen=True, slots=True)
class InputContext:
    """The pipeline that a dataset function builds (tf.distribute.InputContext).

    Attributes:
        num_input_pipelines: Number of pipelines, one for each worker; shard the files by it.
        input_pipeline_id: Index of this pipeline, from 0.
        num_replicas_in_sync: Number of replicas that share a global batch.

    >>> context = InputContext(num_input_pipelines=2, input_pipeline_id=0, num_replicas_in_sync=4)
    >>> [int(x) for x in rd.Dataset.range(6).shard(context.num_input_pipelines, context.input_pipeline_id)]
    [0, 2, 4]
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return `global_batch_size / num_replicas_in_sync`.

        Args:
            global_batch_size: Rows of one step on all replicas together.

        Raises:
            InvalidArgumentError: The quotient is not a whole number.

        >>> InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(32)
        8
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise InvalidArgumentError(
                f"The global batch size must be divisible by the number of replicas, got {global_batch_size} and "
                f"{self.num_replicas_in_sync}. Use {size * self.num_replicas_in_sync} or "
                f"{(size + 1) * self.num_replicas_in_sync}, or distribute_dataset, which splits any batch."
            )
        return size
