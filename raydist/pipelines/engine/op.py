"""The two nouns of the input engine.

A :class:`DatasetOp` *describes* one operation of a pipeline: an immutable, picklable node that knows its inputs. An
:class:`OpIterator` (`op_iterator.py`) *runs* one pass over it. Descriptions start nothing; iterators hold all the state
there is.
"""

from __future__ import annotations

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
from raydist.pipelines.metering.meter import Meter
from raydist.pipelines.metering.reading import StageKind

__all__ = ["DatasetOp", "IterContext", "Placement", "Planned", "Planner"]

Placement = Literal["inline", "pool", "exchange"]
"""Where an operation may run: with its consumer, on a pool of workers, or where all elements pass (reordering)."""


@dataclass(frozen=True, eq=False)
class DatasetOp(ABC):
    """Description of one operation. Subclasses are frozen dataclasses with `eq=False` (an op is itself, not its value).

    No operation asks what type another one is, and neither does the planner: they read these properties. Only a rewrite
    (`optimize/`) names the operations that it is about. An operation of your own becomes a dataset by `rd.Dataset(op)`.

    Args:
        given_name: What the user calls it (`name=` of the method that makes it): shown, and without any other effect.

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
    """Where it may run: "inline", "pool" or "exchange"."""
    preserves_order: ClassVar[bool] = True
    """Whether elements come out in the order in which they came in."""
    content_blind: ClassVar[bool] = False
    """Whether it only picks and orders elements, so that it may work on their indices instead."""
    passes_elements: ClassVar[bool] = False
    """Whether its elements are elements of its inputs, unchanged or put together: rows stay rows."""
    pure: ClassVar[bool] = False
    """Whether `is_pure` is true whatever the settings."""
    state_is_recent: ClassVar[bool] = False
    """Whether its state looks no further back than the last few blocks of its input: then these may come in any order,
    if that is wanted, because the order of so few can be part of the state."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[DatasetOp, ...]:
        """The operations that this one reads, in their order; none for a source."""

    @cached_property
    def chain_length(self) -> int:
        """Operations that follow each other up to this one, at most."""
        return 1 + max((source.chain_length for source in self.inputs), default=0)

    @abstractmethod
    def cardinality(self) -> int:
        """Number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY. Never runs anything."""

    @abstractmethod
    def element_spec(self) -> Any:
        """Nest of `rd.TensorSpec` of one element. May run a user function on the first elements."""

    @abstractmethod
    def make_iterator(self, ctx: IterContext) -> OpIterator:
        """One pass over this operation. Starts nothing: threads begin with the first block that is asked for.

        Args:
            ctx: What the pass is run with; inputs are made with `ctx.build(input)`.
        """

    def at_epoch(self, epoch: int, saved: IteratorState | None) -> DatasetOp:
        """The operation for an epoch that begins now, in the program's process: for sources that keep a state.

        Args:
            epoch: Number of the epoch, from 0.
            saved: For an epoch that another iterator began, what that one's state says of this operation.
        """
        return self

    def random_access(self) -> RandomAccess | None:
        """How to read any element by its index, or None where that is not possible. Reads nothing yet."""
        return None

    @property
    def order_settings(self) -> str:
        """Settings that decide which of its elements comes when: a state fits only where they are the same."""
        return ""

    @property
    def gives_rows(self) -> bool:
        """Return True if no element can be a batch: rows of a source that no operation makes batches of.

        Where a user's function, or another operation that may make batches, lies in between, nobody can tell: False.
        """
        return (self.passes_elements or self.content_blind) and any(source.gives_rows for source in self.inputs)

    @property
    def has_declared_shapes(self) -> bool:
        """Return True if `element_spec` is a promise; False if a function's first results were looked at."""
        return all(source.has_declared_shapes for source in self.inputs)

    @property
    def own_seed(self) -> int | None:
        """The seed of a random order that the operation keeps from iteration to iteration; None without such an order.

        It was drawn when the operation was made, so a state has it: the operation of another program drew another one.
        """
        return None

    @property
    def is_pure(self) -> bool:
        """Whether its elements follow from its inputs' elements and its settings alone.

        No random choice, and no function of the user's that may remember something from call to call.
        """
        return self.pure

    @property
    def held(self) -> Block | None:
        """All elements, where they lie in memory as they are."""
        return None

    def of_groups(self, inputs: Sequence[Groups]) -> Groups | None:
        """What many operations like this one make of their inputs, at once.

        Only for operations without a function of the user's, without random choices, and without errors of their own.

        Args:
            inputs: For each input of this operation, its elements in all these operations.

        Returns:
            The elements of all of them; None where each takes an iterator.
        """
        return None

    @property
    def options(self) -> Options | None:
        """Options that this operation sets for the whole pipeline."""
        return None

    @property
    def is_noop(self) -> bool:
        """Whether the only input can stand for this operation."""
        return False

    @property
    def name(self) -> str:
        """The method that made this operation, for `explain()` and messages."""
        return type(self).__name__.removesuffix("Op").lower()

    @property
    def label(self) -> str:
        """`name` and the arguments worth showing, for `explain()` and messages."""
        return self.name

    @final
    @property
    def full_label(self) -> str:
        """`label`, and what the user calls the operation."""
        return self.label if self.given_name is None else f'{self.label} "{self.given_name}"'


class Planned(Protocol):
    """A graph that is ready to be run."""

    @property
    def optimised(self) -> DatasetOp:
        """The graph."""

    @property
    def names(self) -> dict[int, str]:
        """Name of each operation, by `id`."""


Planner = Callable[[DatasetOp, Options], Planned]
"""Gets a graph ready to be run. Runs nothing."""


@final
@dataclass(frozen=True, slots=True)
class IterContext:
    """What one pass over a pipeline is run with.

    Attributes:
        seed: Root seed of the iteration: `Options(seed=)`, or drawn when it started.
        epoch: Epoch of the dataset object, then one pass number per enclosing `repeat`.
        options: The merged options of the whole pipeline.
        executor: Runs kernels: inline, on threads, or on a pool of actors.
        operation_names: Stable name of each operation (by `id`) in the pipeline as written: "shuffle-3".
        builder: Turns an op into an iterator, fusing neighbouring kernels (`build.py`).
        planner: Names and rewrites the graph of a dataset inside a function.
        plan: Whoever owns the operations: kept, because `operation_names` knows them by `id`.
        meters: Count and time what every stage does.
        budgets: Threads and memory that it may use.
        orders: Notes of the stages that hand out blocks in any order.
        any_order: Whether stages may do so here: their readers have recent states, saved together with `orders`.
        own_seeds: By name, those of operations that keep one order for ever. Operations of datasets that functions make
            have none: they are made anew each time.
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
    own_seeds: Mapping[str, int] = field(repr=False, default_factory=dict)

    def build(self, op: DatasetOp) -> OpIterator:
        """An iterator over `op`."""
        return self.builder(op, self)

    def inner_epoch(self, pass_index: int) -> IterContext:
        """The context of pass `pass_index` of what is inside a `repeat`."""
        return replace(self, epoch=(*self.epoch, pass_index))

    def meter(self, op: DatasetOp) -> Meter:
        """The meter of an operation that is a stage of its own."""
        kind: StageKind = "source" if not op.inputs else "stage" if op.preserves_order else "exchange"
        inputs = [id(source) for source in op.inputs]
        name = self.operation_names[id(op)]
        return self.meters.meter(name, label=op.full_label, kind=kind, inputs=inputs, owner=(type(op).__name__,))

    def key(self, op: DatasetOp, seed: int | None = None, *, every_epoch: bool = True) -> RandomKey:
        """The random stream of `op`. An explicit `seed` names it alone: two operations of one kind and seed agree."""
        epoch = self.epoch if every_epoch else ()
        if seed is not None:
            return RandomKey(seed, op.name, epoch)
        return RandomKey(self.seed, self.operation_names[id(op)], epoch)
