"""Dataset.scan: a map with a state that each element updates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.exception_utils import LEAVING, annotate, as_exception
from raydist.pipelines.elements.blocks import Block, private_column
from raydist.pipelines.elements.element_nests import map_element
from raydist.pipelines.elements.fold import FoldState
from raydist.pipelines.elements.functions import element_rows, function_label
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.tensor_functions import note_numpy_in_torch, receiving_tensors
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.probe import probe_spec
from raydist.pipelines.engine.producers import Producer, ReplayIterator, SpecGuard, read_item
from raydist.pipelines.ops.map import items_of_results


@final
@dataclass(frozen=True, eq=False)
class ScanOp(UnaryOp):
    """The second results of `fn(state, element)`; the first result is the state for the next element."""

    initial_state: Any
    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise InvalidArgumentError(f"scan needs a function, got {self.fn!r:.100}.")
        map_element(as_leaf, self.initial_state)

    @property
    def label(self) -> str:
        return f"scan({function_label(self.fn)})"

    @property
    def has_declared_shapes(self) -> bool:
        return False

    def element_spec(self) -> Any:
        return self._spec

    @cached_property
    def _spec(self) -> Any:
        return probe_spec(self)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        label = f"{ctx.operation_names[id(self)]} ({function_label(self.fn)})"
        return ReplayIterator(_Scanning(self, ctx.build(self.input), label))


@final
class _Scanning(ClosesInput, Producer):
    """A producer that turns a failing call into an error in the element's place and keeps the state before it."""

    def __init__(self, op: ScanOp, source: OpIterator, label: str) -> None:
        self._fn = receiving_tensors(op.fn)
        self._carried = FoldState(op.initial_state)
        self._source = source
        self._label = label
        self._kind = SpecGuard(label)
        self._index = 0

    def make(self, limit: int) -> Sequence[Item]:
        item = read_item(self._source, limit)
        if isinstance(item, ElementError):
            self._index += 1
            return [item]
        return self._kind.checked(self._scan(item))

    def _scan(self, block: Block) -> list[Item]:
        columns = [private_column(column) for column in block.columns]
        elements = element_rows(block.structure, columns)
        results = [self._step(element, index) for index, element in enumerate(elements, self._index)]
        failed = [row for row, result in enumerate(results) if isinstance(result, ElementError)]
        items = items_of_results(results, failed, self._index)
        for item in items:
            if isinstance(item, ElementError):
                annotate(item.error, f"In {self._label}, element {item.index} of its input.")
        self._index += block.num_rows
        return items

    def _step(self, element: Any, index: int) -> Any:
        try:
            result = self._fn(copy.deepcopy(self._carried.value), element)
            if not isinstance(result, tuple) or len(result) != 2:
                raise SpecError(f"The function of scan must return (state, output), got {result!r:.100}.")
            self._carried.replace(result[0], self._label)
        except LEAVING:
            raise
        except BaseException as error:  # of the user's function on this element
            note_numpy_in_torch(error)
            return ElementError(as_exception(error), index)
        return result[1]
