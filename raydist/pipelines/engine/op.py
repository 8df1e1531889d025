"""The two interfaces of the pipeline engine.

A :class:`DatasetOp` *describes* one operation of a pipeline: an immutable, picklable node that knows its inputs. An
:class:`OpIterator` (`op_iterator.py`) *runs* one pass over it. Descriptions start nothing; iterators hold all the
state.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, final

from raydist.options import Options
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import Groups, IteratorState
from raydist.pipelines.elements.seeds import RandomKey
from raydist.pipelines.engine.arrival_order import ArrivalOrders
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.executor import Executor
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.random_access import RandomAccess
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Meter, StageKind

Placement = Literal["inline", "pool", "exchange"]
"""Place of an operation: "inline" with its consumer, on a "pool" of workers, or at an "exchange", where all elements
meet to be reordered."""


@dataclass(frozen=True, eq=False)
class DatasetOp(ABC):
    """Description of one operation. Subclasses are frozen dataclasses with `eq=False`: operations compare by identity.

    The planner and other operations read the properties below and never test the type of an operation. Only rewrites
    (`optimize/`) name the operations that they change. `rd.Dataset(op)` makes a dataset of your own operation.

    Args:
        given_name: Name from the user (`name=` of the method that makes the operation), for display only.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, eq=False)
    ... class Titled(rd.DatasetOp):  # passes elements on, with a title for explain() and stats()
    ...     input: rd.DatasetOp
    ...     title: str
    ...     @property
    ...     def inputs(self):
    ...         return (self.input,)
    ...     @property
    ...     def label(self):
    ...         return self.title
    ...     def cardinality(self):
    ...         return self.input.cardinality()
    ...     def element_spec(self):
    ...         return self.input.element_spec()
    ...     def make_iterator(self, ctx):
    ...         return ctx.build(self.input)
    >>> ds = rd.Dataset.range(3).apply(lambda ds: rd.Dataset(Titled(ds._op, "the numbers")))
    >>> ds, [int(x) for x in ds]
    (<Dataset the numbers, cardinality 3>, [0, 1, 2])
    """

    given_name: str | None = field(default=None, kw_only=True, metadata={"fingerprint": False})

    placement: ClassVar[Placement] = "inline"
    """The place where the operation may run: "inline", "pool" or "exchange"."""
    preserves_order: ClassVar[bool] = True
    """True if elements come out in the order in which they came in."""
    content_blind: ClassVar[bool] = False
    """True if the operation only selects and reorders elements. It may then work on their indices instead."""
    takes_row_ids: ClassVar[bool] = False
    """True if the operation moves rows without reading their values. Its inputs may then return blocks of row ids (see
    `elements/columns.py`), and the operation may return row ids, too."""
    passes_elements: ClassVar[bool] = False
    """True if the operation returns the elements of its inputs unchanged: a row of a source stays a row."""
    pure: ClassVar[bool] = False
    """True if `is_pure` is true for all settings."""
    state_is_recent: ClassVar[bool] = False
    """True if the state depends only on the last few blocks of the input. If the options allow it, blocks may then come
    in any order, because the state can record the order of a few blocks."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[DatasetOp, ...]:
        """The operations that this one reads, in order; empty for a source."""

    @cached_property
    def chain_length(self) -> int:
        """Number of operations on the longest path from a source to this one."""
        return 1 + max((source.chain_length for source in self.inputs), default=0)

    @abstractmethod
    def cardinality(self) -> int:
        """Return the number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY. Never runs anything."""

    @abstractmethod
    def element_spec(self) -> Any:
        """Return the nest of `rd.TensorSpec` of one element. May run a user function on the first elements."""

    @abstractmethod
    def make_iterator(self, ctx: IterContext) -> OpIterator:
        """Return an iterator for one pass over this operation. Threads start with the first request for a block.

        Args:
            ctx: Context of the pass; `ctx.build(input)` makes the iterators of inputs.
        """

    def at_epoch(self, epoch: int, saved: IteratorState | None) -> DatasetOp:
        """Return the operation for an epoch that begins now. The driver calls this.

        Sources that keep a state between epochs override this method.

        Args:
            epoch: Number of the epoch, from 0.
            saved: State of this operation, if another iterator began the epoch.
        """
        return self

    def random_access(self) -> RandomAccess | None:
        """Return random access to the elements; None if the operation has none. Reads nothing yet."""
        return None

    @property
    def order_settings(self) -> str:
        """Settings that decide the order of the elements. A saved state needs an operation with the same settings."""
        return ""

    @property
    def gives_rows(self) -> bool:
        """Return True if each element is one row of a source, and no element is a batch.

        Return False if the user's functions might make batches between a source and this operation.
        """
        return (self.passes_elements or self.content_blind) and any(source.gives_rows for source in self.inputs)

    @property
    def has_declared_shapes(self) -> bool:
        """Return True if `element_spec` is guaranteed; False if it is inferred from the first results of a function."""
        return all(source.has_declared_shapes for source in self.inputs)

    @property
    def own_seed(self) -> int | None:
        """The seed of a random order that is the same in all iterations; None without such an order.

        The operation draws the seed when it is created. A saved state contains the seed, because the operation of
        another program draws another one.
        """
        return None

    @property
    def is_pure(self) -> bool:
        """Return True if the elements depend only on the elements of the inputs and on the settings.

        A pure operation makes no random choice and calls no user function, which might keep state between calls.
        """
        return self.pure

    @property
    def held(self) -> Block | None:
        """One block of all elements, if the operation has such a block in memory; None otherwise."""
        return None

    def of_groups(self, inputs: Sequence[Groups]) -> Groups | None:
        """Return the results of many operations like this one, computed at once.

        Operations with user functions, random choices or errors of their own must not override this.

        Args:
            inputs: For each input of this operation, the elements of that input in all these operations.

        Returns:
            The elements of all operations; None if each operation needs an iterator.
        """
        return None

    @property
    def options(self) -> Options | None:
        """Options that this operation sets for the whole pipeline."""
        return None

    @property
    def is_noop(self) -> bool:
        """Return True if the only input can replace this operation."""
        return False

    @property
    def name(self) -> str:
        """The method that makes this operation, for `explain()` and messages."""
        return re.sub("(?<=[a-z])(?=[A-Z])", "_", type(self).__name__.removesuffix("Op")).lower()

    @property
    def label(self) -> str:
        """`name` and the main arguments, for `explain()` and messages."""
        return self.name

    @final
    @property
    def full_label(self) -> str:
        """`label`, and the user's name of the operation."""
        return self.label if self.given_name is None else f'{self.label} "{self.given_name}"'


def merged_options(op: DatasetOp) -> Options:
    """Return the options set in the graph of `op`. Operations win over their inputs, later inputs over earlier ones."""
    merged = Options()
    for source in op.inputs:
        merged = merged.merge(merged_options(source))
    return merged if op.options is None else merged.merge(op.options)


class Planned(Protocol):
    """A graph that is ready to run."""

    @property
    def optimised(self) -> DatasetOp:
        """The graph that runs."""

    @property
    def names(self) -> dict[int, str]:
        """Name of each operation, by `id`."""


Planner = Callable[[DatasetOp, Options], Planned]
"""Function that prepares a graph for running. Runs nothing."""


@final
@dataclass(frozen=True, slots=True)
class IterContext:
    """The context of one pass over a pipeline.

    Attributes:
        seed: Root seed of the iteration: `Options(seed=)`, or a random number drawn at the start.
        epoch: Epoch of the dataset object, then one pass number per enclosing `repeat`.
        options: The merged options of the whole pipeline.
        executor: Runs kernels: inline, on threads, or on a pool of actors.
        operation_names: Stable name of each operation (by `id`) in the pipeline as written: "shuffle-3".
        builder: Turns an op into an iterator, fusing neighbouring kernels (`build.py`).
        planner: Names and rewrites the graph of a dataset that a function returns.
        plan: Plan that owns the operations. It keeps them alive, because `operation_names` identifies them by `id`.
        meters: Meters of the elements and the time of every stage.
        budgets: Threads and memory that the pass may use.
        orders: Recorded orders of the stages that return blocks in any order.
        row_ids: True if the consumer accepts blocks of row ids; False if the consumer needs values.
        readers: Executor whose workers read files and keep the contents; None to read in this process.
        any_order: True if stages may return blocks in any order: the states of their consumers depend on the last few
            blocks only, and are saved together with `orders`.
        own_seeds: Seeds by operation name, for operations that keep one order in all iterations. A dataset that a
            function returns has none here, because each call makes new operations.
    """

    seed: int
    epoch: tuple[int, ...]
    options: Options
    executor: Executor
    operation_names: dict[int, str] = field(repr=False)
    builder: Callable[[DatasetOp, IterContext], OpIterator] = field(repr=False)
    planner: Planner = field(repr=False)
    plan: object = field(repr=False, default=None)
    meters: IterationMeters = field(repr=False, default_factory=IterationMeters)
    budgets: Budgets = field(repr=False, default_factory=Budgets)
    orders: ArrivalOrders = field(repr=False, default_factory=ArrivalOrders)
    any_order: bool = False
    row_ids: bool = False
    readers: Executor | None = field(repr=False, default=None)
    own_seeds: Mapping[str, int] = field(repr=False, default_factory=dict)

    def build(self, op: DatasetOp) -> OpIterator:
        """Return an iterator over `op`."""
        return self.builder(op, self)

    def inner_epoch(self, pass_index: int) -> IterContext:
        """Return the context of pass `pass_index` over the operations inside a `repeat`."""
        return replace(self, epoch=(*self.epoch, pass_index))

    def meter(self, op: DatasetOp) -> Meter:
        """Return the meter of an operation that is a stage of its own."""
        kind: StageKind = "source" if not op.inputs else "stage" if op.preserves_order else "exchange"
        inputs = [id(source) for source in op.inputs]
        name = self.operation_names[id(op)]
        return self.meters.meter(name, label=op.full_label, kind=kind, inputs=inputs, owner=(type(op).__name__,))

    def key(self, op: DatasetOp, seed: int | None = None, *, every_epoch: bool = True) -> RandomKey:
        """Return the random stream of `op`. With `seed`, all operations of the same kind and seed share a stream."""
        epoch = self.epoch if every_epoch else ()
        if seed is not None:
            return RandomKey(seed, op.name, epoch)
        return RandomKey(self.seed, self.operation_names[id(op)], epoch)
