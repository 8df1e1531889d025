"""Datasets inside datasets: results of a user's function, which run as a part of the outer pipeline.

This module identifies a dataset by its operation; the class Dataset is in a higher layer.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

from raydist.core.errors import FailedPreconditionError, SpecError
from raydist.core.exception_utils import annotate
from raydist.pipelines.elements.blocks import Block, concat_blocks, private_column
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.functions import call_rows, function_label
from raydist.pipelines.elements.items import ElementError, Groups, Item, IteratorState
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.probe import PROBED_ELEMENTS, QUICK_S, merged_specs, open_probe
from raydist.pipelines.ops.cycle import Opener

_PROBES = 16  # datasets to ask for an element_spec
_MAX_RUN = 256  # datasets made at a time


def rows_of(ops: Sequence[DatasetOp]) -> Block | None:
    """Return the elements of similar datasets, one dataset after the other; None where iterators are needed."""
    held = [op.held for op in ops]
    first = held[0]
    if first is None:
        groups = groups_of(ops)
        return None if groups is None else groups.rows
    same = [block for block in held if block is not None and _is_of_one_kind(first, block)]
    if len(same) < len(ops):
        return None
    return concat_blocks(same) if len(same) > 1 else first.shared()


def groups_of(ops: Sequence[DatasetOp]) -> Groups | None:
    """Return the elements of similar datasets as groups; None where they differ or iterators are needed."""
    first = ops[0]
    held = first.held
    if held is not None:
        return _joined([op.held for op in ops])
    if type(first).of_groups is DatasetOp.of_groups or not _alike(ops):
        return None
    inputs: list[Groups] = []
    for number in range(len(first.inputs)):
        groups = groups_of([op.inputs[number] for op in ops])
        if groups is None:
            return None
        inputs.append(groups)
    return first.of_groups(inputs)


def _joined(blocks: Sequence[Block | None]) -> Groups | None:
    first = blocks[0]
    if first is None:
        return None
    same = [block for block in blocks if block is not None and _fits(first, block)]
    if len(same) < len(blocks):
        return None
    rows = concat_blocks(same) if len(same) > 1 else first.shared()
    return Groups(rows, len(same), first.num_rows)


def _fits(first: Block, other: Block) -> bool:
    return first.num_rows == other.num_rows and _is_of_one_kind(first, other)


def _is_of_one_kind(first: Block, other: Block) -> bool:
    if first.structure != other.structure:
        return False
    return first.specs is other.specs or first.specs == other.specs


def _alike(ops: Sequence[DatasetOp]) -> bool:
    """Return True if the operations differ only in their inputs."""
    kind = type(ops[0])
    if any(type(op) is not kind for op in ops):
        return False
    settings = _settings(ops[0])
    try:
        return not settings or len(set(map(operator.attrgetter(*settings), ops))) == 1
    except TypeError:  # a setting that cannot be compared
        return False


def _settings(op: DatasetOp) -> list[str]:
    """Return the fields of an operation that are settings, not inputs."""
    inputs = op.inputs
    read = {id(inputs), *map(id, inputs)}
    names = [field.name for field in dataclasses.fields(op) if field.name != "given_name"]
    return [name for name in names if id(getattr(op, name)) not in read]


def graph_of(value: Any, label: str) -> DatasetOp:
    """Return the operation of a dataset that a user's function returned.

    Raises:
        SpecError: The value is no dataset.
    """
    op = getattr(value, "_op", None)
    if not isinstance(op, DatasetOp):
        raise SpecError(f"The function of {label} must return a Dataset, got {value!r:.100}.")
    return op


def call_on_element(fn: Callable[..., Any], block: Block, row: int) -> Any:
    """Call `fn` on one element of a block; a tuple is unpacked into arguments."""
    one = block.slice(row, row + 1)
    element = Block(one.structure, one.specs, tuple(map(private_column, one.columns)), 1).row(0)
    return fn(*element) if block.structure.kind is tuple else fn(element)


def open_nested(op: DatasetOp, ctx: IterContext, name: str, index: int) -> OpIterator:
    """Start one pass over `op`, the dataset that operation `name` made from element number `index`.

    Random choices depend on both. The pass runs in the caller's thread: a pool would receive a new stage for each of
    thousands of short datasets. Files are read by the pool.
    """
    plan = ctx.planner(op, ctx.options)
    names = {node: f"{name}/{inner}" for node, inner in plan.names.items()}
    executor = InlineExecutor()
    meters = ctx.meters.inside(name)
    epoch = (*ctx.epoch, index)
    inner = IterContext(
        ctx.seed, epoch, ctx.options, executor, names, ctx.builder, ctx.planner, plan, meters, ctx.budgets
    )
    inner = replace(inner, row_ids=ctx.row_ids, readers=ctx.readers)
    return inner.build(plan.optimised)


def probe_nested(source: DatasetOp, fn: Callable[..., Any], label: str) -> Any:
    """Return the nest of TensorSpec of elements of the datasets that `fn` makes from first elements of `source`.

    A dimension in which these datasets differ is None. Datasets without a known spec (such as a map over nothing) are
    skipped.

    Raises:
        FailedPreconditionError: None of the first few datasets has a spec.
    """
    found: list[Any] = []
    deadline = time.monotonic() + QUICK_S
    iterator = open_probe(source)
    try:
        for number in range(_PROBES):
            if found and (number >= PROBED_ELEMENTS or time.monotonic() > deadline):
                break
            try:
                made = graph_of(call_on_element(fn, iterator.next_block(1), 0), label)
                found.append(flatten_element(made.element_spec()))
            except FailedPreconditionError:
                continue
            except StopIteration:
                break
            except Exception:
                if not found:
                    raise
                break
    finally:
        iterator.close()
    if found:
        return merged_specs(found)
    raise FailedPreconditionError(
        f"The element_spec of {label} is found by running it on first elements, and they gave no dataset with a first "
        "element. Declare output_spec= where a map makes the elements."
    )


@final
class DatasetOpener(Opener):
    """An opener of the datasets that a function makes. May read inputs, and call the function, some inputs ahead."""

    def __init__(self, source: OpIterator, fn: Callable[..., Any], ctx: IterContext, name: str) -> None:
        super().__init__(source, name)
        self._fn = fn
        self._ctx = ctx
        self._ahead: deque[DatasetOp | ElementError] = deque()  # made from the inputs from `next_index` on
        self._before: tuple[IteratorState, int] = ({}, 0)  # input's state before these, number of the first
        self._run = 1  # number of inputs whose datasets were alike, a guess for the next ones
        self._size = 1  # elements of each of these datasets

    def open_next(self) -> OpIterator | ElementError:
        self._look_ahead(1)
        made = self._pop()
        if isinstance(made, ElementError):
            return made
        index = self.next_index - 1
        try:
            return open_nested(made, self._ctx, self.name, index)
        except Exception as error:
            return ElementError(self._explained(error, index))

    def next_groups(self, limit: int) -> Block | None:
        run = min(self._run, max(1, limit // self._size))
        self._look_ahead(run)
        first = itertools.takewhile(lambda made: isinstance(made, DatasetOp), itertools.islice(self._ahead, run))
        ops = [made for made in first if isinstance(made, DatasetOp)]
        rows = rows_of(ops) if ops else None
        if rows is None or rows.num_rows == 0:
            self._run = 1
            return None
        for _ in ops:
            self._pop()
        self._run, self._size = min(2 * self._run, _MAX_RUN), max(1, rows.num_rows // len(ops))
        return rows

    def _look_ahead(self, count: int) -> None:
        """Make the datasets of up to `count` inputs, unless some are in memory."""
        if self._ahead:
            return
        self._before = self._source.state_dict(), self.next_index
        self._make_datasets(self._read(count))

    def _make_datasets(self, item: Item) -> None:
        if isinstance(item, ElementError):
            self._ahead.append(item)
            return
        made, _ = call_rows(self._fn, item, self.next_index)
        self._ahead.extend(self._graph(value, self.next_index + row) for row, value in enumerate(made))

    def _graph(self, value: Any, index: int) -> DatasetOp | ElementError:
        try:
            if isinstance(value, ElementError):
                raise value.error
            return graph_of(value, self.name)
        except Exception as error:  # of the user's function on this element
            return ElementError(self._explained(error, index))

    def _explained(self, error: Exception, index: int) -> Exception:
        annotate(error, f"In {self.name} ({function_label(self._fn)}), element {index} of its input.")
        return error

    def _pop(self) -> DatasetOp | ElementError:
        self.next_index += 1
        return self._ahead.popleft()

    def position(self) -> tuple[IteratorState, int]:
        return self._before if self._ahead else (self._source.state_dict(), self.next_index)
