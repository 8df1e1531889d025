"""Datasets inside datasets: what a user's function returned, run as a part of the pipeline around it.

This layer lies below the class that users hold, and knows a dataset by the operation that it carries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from raydist.errors import FailedPreconditionError, SpecError
from raydist.pipelines.blocks import Block, private_column
from raydist.pipelines.executor import InlineExecutor
from raydist.pipelines.functions import describe
from raydist.pipelines.merged import merged_options
from raydist.pipelines.op import DatasetOp, ElementError, Item, IterContext, OpIterator, State
from raydist.pipelines.ops.prefetch import PrefetchOp
from raydist.pipelines.plan import build, make_plan, open_iterator
from raydist.pipelines.producers import read_item

__all__ = ["Opener", "call_on_element", "graph_of", "open_nested", "probe_nested"]

_PROBES = 16  # datasets asked for their element_spec


def graph_of(value: Any, label: str) -> DatasetOp:
    """The operations of a dataset that a user's function returned.

    Raises:
        SpecError: It is no dataset.
    """
    op = getattr(value, "_op", None)
    if not isinstance(op, DatasetOp):
        raise SpecError(f"The function of {label} must return a Dataset, got {value!r:.100}.")
    return op


def call_on_element(fn: Callable[..., Any], block: Block, row: int) -> Any:
    """`fn` of one element of a block; a tuple is unpacked into arguments."""
    one = block.slice(row, row + 1)
    element = Block(one.structure, one.specs, tuple(map(private_column, one.columns)), 1).row(0)
    return fn(*element) if block.structure.kind is tuple else fn(element)


def open_nested(op: DatasetOp, ctx: IterContext, name: str, index: int) -> OpIterator:
    """One pass over `op`, the dataset that operation `name` made of its element `index`.

    Its random choices depend on both, and it runs in the caller's thread: a pool would be sent a new stage for every
    one of thousands of short datasets.
    """
    plan = make_plan(op, ctx.options)
    names = {node: f"{name}/{inner}" for node, inner in plan.names.items()}
    executor = InlineExecutor()
    meters = ctx.meters.inner
    inner = IterContext(ctx.seed, (*ctx.epoch, index), ctx.options, executor, names, build, plan, meters)
    return build(plan.optimised, inner)


def probe_nested(source: DatasetOp, fn: Callable[..., Any], label: str) -> Any:
    """Nest of TensorSpec of the elements of the datasets that `fn` makes of the first elements of `source`.

    The first dataset answers that can: one of a map function over nothing cannot tell.

    Raises:
        FailedPreconditionError: None of the first few can.
    """
    iterator = open_iterator(source, seed=0, epoch=0, options=merged_options(source), executor=InlineExecutor())
    try:
        for _ in range(_PROBES):
            try:
                return graph_of(call_on_element(fn, iterator.next_block(1), 0), label).element_spec()
            except (FailedPreconditionError, StopIteration):
                continue
    finally:
        iterator.close()
    raise FailedPreconditionError(
        f"The element_spec of {label} is found by running it on first elements, and they gave no dataset with a first "
        "element. Declare output_spec= where a map makes the elements."
    )


@final
class Opener:
    """Makes datasets of the elements of an input, one by one, and opens them.

    Attributes:
        name: Of the operation.
        next_index: Number of the next input.
        ended: Whether there is none.
    """

    def __init__(self, source: OpIterator, fn: Callable[..., Any], ctx: IterContext, name: str) -> None:
        self.name = name
        self.next_index = 0
        self.ended = False
        self._source = source
        self._fn = fn
        self._ctx = ctx

    def open_next(self, *, threaded: bool) -> OpIterator | ElementError:
        """The dataset of the next input, read ahead by a thread if `threaded`; or the error at this place.

        Raises:
            StopIteration: There are no more.
        """
        item = self._next()
        if isinstance(item, ElementError):
            return item
        index = self.next_index - 1
        try:
            op = graph_of(call_on_element(self._fn, item, 0), self.name)
            return open_nested(PrefetchOp(op) if threaded else op, self._ctx, self.name, index)
        except Exception as error:  # of the user's function, on this element
            error.add_note(f"In {self.name} ({describe(self._fn)}), element {index} of its input.")
            return ElementError(error)

    def pass_over(self) -> None:
        """Read the next input and leave it: its dataset had ended before the state was saved."""
        self._next()

    def _next(self) -> Item:
        if self.ended:
            raise StopIteration
        try:
            item = read_item(self._source, 1)
        except StopIteration:
            self.ended = True
            raise
        self.next_index += 1
        return item

    def state_dict(self) -> State:
        """The input's state."""
        return self._source.state_dict()

    def load_state_dict(self, state: State, next_index: int) -> None:
        """Go on in front of input `next_index`."""
        self._source.load_state_dict(state)
        self.next_index = next_index

    def close(self) -> None:
        """Close the input."""
        self._source.close()
