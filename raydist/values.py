"""Values that exist once per replica, and the small words shared by every layer."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, final

from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.foreign_errors import folded
from raydist.no_number import NoNumber

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "InputContext",
    "Leaves",
    "Part",
    "PerReplica",
    "ReduceOp",
    "Replicated",
]

AUTOTUNE = -1
"""Let raydist choose a parallelism or a buffer size (tf.data.AUTOTUNE)."""

INFINITE_CARDINALITY = -1
"""The cardinality of a dataset without an end (tf.data.INFINITE_CARDINALITY)."""

UNKNOWN_CARDINALITY = -2
"""The cardinality of a dataset whose elements nobody has counted (tf.data.UNKNOWN_CARDINALITY)."""


@final
class ReduceOp(enum.Enum):
    """How values of several replicas become one (tf.distribute.ReduceOp, and what collectives add).

    Attributes:
        SUM: Their sum.
        MEAN: Their mean; `strategy.reduce` says what weighs how much.
        MIN: The smallest, element by element.
        MAX: The largest, element by element.
        PRODUCT: Their product.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PRODUCT = "PRODUCT"

    # Members are singletons: what Enum does in Python for every look into a table of them is not needed.
    __hash__ = object.__hash__

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """The op for a `ReduceOp` or its name in any case.

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


_OPS = {op.value: op for op in ReduceOp}  # a look into an Enum's own table takes three calls in Python


@final
class Replicated:
    """Marks a value in a batch that goes whole to every replica: class weights, say, or the edges of a graph.

    Use it as a leaf of an element of a dataset (what a function of `map` returns, say), or in the arguments of
    `strategy.run`. Steps and plain iterations get the value itself; functions of later transformations get this object,
    so that the mark is not lost. All other leaves of a batch must have equally many rows.

    Args:
        value: In a dataset an array, tensor, number, bytes or str; in arguments of `run` anything.

    Attributes:
        value: The same.

    >>> weights = [1.0, 2.0, 3.0]
    >>> ds = rd.Dataset.range(4).batch(4).map(lambda x: {"x": x, "weights": rd.Replicated(weights)})
    >>> next(iter(ds))["weights"]
    tensor([1., 2., 3.])

    Source: an argument of tf.distribute.Strategy.run that is no distributed value.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Replicated({self.value!r})"


class Leaves(Protocol):
    """What one replica's part of a nest is stored as: one object whose leaves are picked by number.

    An object may hold the parts of several steps, each at its place.
    """

    absent: bool
    """True for the results of a replica that had no rows: reductions pass over them."""

    def leaf(self, index: int, place: int = 0) -> Any:
        """Leaf `index` of the part at `place`, as the user sees it (a torch tensor, a number, ...)."""


@final
@dataclass(frozen=True, slots=True)
class Part:
    """Where one replica's value of a PerReplica is: a leaf of the `Leaves` stored as `ref`, or `value`.

    Attributes:
        ref: The object's; None for `value`.
        leaf_index: Which leaf.
        value: The value itself.
        place: Which of the steps in the object.
        on_host: It stays in the host's memory, whatever the replica's device.
        nest: What the object must hold there, as a `Structure` is shown; empty where that is known.
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


class PerReplica(NoNumber):
    """One value per replica: a leaf of a distributed batch or of the result of `strategy.run`.

    The values themselves may still be computed; :attr:`values` waits for them, and so does printing. Subclasses know
    where they are. It is no number: use `strategy.reduce`, or `strategy.local_results` for the single values.

    Args:
        values: One per replica, in their order.

    Source: tf.distribute.DistributedValues, PerReplica.

    >>> PerReplica([1, 2]).values
    (1, 2)
    """

    __nest_leaf__ = True

    rows: tuple[int, ...] | None = None
    """Rows on each replica, where this is a leaf of a distributed batch."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values: tuple[Any, ...] | None = tuple(values)

    @property
    @folded
    def values(self) -> tuple[Any, ...]:
        """The values in replica order, fetched when first asked for.

        Blocks until all are there, and raises what failed. Results of replicas that had no rows are left out.
        """
        if self._values is None:
            self._values = self._fetch()
        return self._values

    @property
    def num_parts(self) -> int:
        """Number of replicas that this value has parts on (known without waiting)."""
        return len(self.values)

    @property
    def weights(self) -> tuple[int, ...] | None:
        """What each of :attr:`values` weighs in a mean over replicas; None: all the same.

        For results of a step the rows that each replica worked on. Waits for them.

        >>> PerReplica([1, 2]).weights is None
        True
        """
        return None

    def part_on(self, rank: int, *, stand_in: bool = False) -> Part:
        """Where the value of one replica is. Never blocks where the value is on a replica.

        Args:
            rank: The replica, from 0.
            stand_in: For a replica without rows: the rows that it works on in their place.

        >>> PerReplica(["a", "b"]).part_on(1).value
        'b'
        """
        return Part(value=self.values[rank])

    def _fetch(self) -> tuple[Any, ...]:
        raise FailedPreconditionError("raydist bug: a PerReplica without values must know how to fetch them.")

    def _ranks(self) -> Sequence[int]:
        """The replica of each of the values."""
        return range(len(self.values))

    @folded
    def __repr__(self) -> str:
        values = self.values  # waits: printing is reading
        inner = ", ".join(f"{rank}: {value!r}" for rank, value in zip(self._ranks(), values, strict=True))
        return f"PerReplica({inner})"

    @folded
    def __getattr__(self, name: str) -> Any:
        found = getattr(type(self), name, None)
        if isinstance(found, property):  # it raised: an AttributeError of a step, say
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
        """What a function of torch does that is given one in the place of a tensor."""
        raise InvalidArgumentError(f"{_ONE_FOR_EACH} {getattr(function, '__name__', function)} of torch takes tensors.")


@final
@dataclass(frozen=True, slots=True)
class InputContext:
    """Tells a dataset function for whom it builds (tf.distribute.InputContext).

    Attributes:
        num_input_pipelines: Pipelines that are built, one for each worker; shard the files by it.
        input_pipeline_id: Which of them this one is, from 0.
        num_replicas_in_sync: Replicas that share a global batch.

    >>> context = InputContext(num_input_pipelines=2, input_pipeline_id=0, num_replicas_in_sync=4)
    >>> [int(x) for x in rd.Dataset.range(6).shard(context.num_input_pipelines, context.input_pipeline_id)]
    [0, 2, 4]
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """`global_batch_size / num_replicas_in_sync`.

        Args:
            global_batch_size: Rows of one step of all replicas together.

        Raises:
            InvalidArgumentError: That is no whole number.

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
