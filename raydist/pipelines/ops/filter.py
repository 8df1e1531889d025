"""Dataset.filter: the elements for which a predicate is true."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from raydist.errors import InvalidArgumentError, SpecError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.functions import call_rows, function_label
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_kinds import ElementwiseOp, UnaryOp
from raydist.values import UNKNOWN_CARDINALITY

__all__ = ["FilterOp", "ask_rows"]


@final
@dataclass(frozen=True, eq=False)
class FilterOp(UnaryOp, ElementwiseOp):
    """The elements of `input` for which `predicate` returns True."""

    passes_elements: ClassVar[bool] = True

    pure: ClassVar[bool] = True

    predicate: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.predicate):
            raise InvalidArgumentError(f"filter needs a function, got {self.predicate!r}.")

    @property
    def label(self) -> str:
        return f"filter({function_label(self.predicate)})"

    def cardinality(self) -> int:
        return 0 if self.input.cardinality() == 0 else UNKNOWN_CARDINALITY

    def kernel(self, ctx: IterContext) -> Kernel:
        return _FilterKernel(self.predicate, f"{ctx.operation_names[id(self)]} ({function_label(self.predicate)})")


@final
@dataclass(frozen=True, eq=False)
class _FilterKernel(Kernel):
    preserves_count: ClassVar[bool] = False
    predicate: Callable[..., Any]
    label: str

    @property
    def uses_index(self) -> bool:
        return False

    def run(self, block: Block, start: int) -> Sequence[Item]:
        answers, failed = ask_rows(self.predicate, block, start)
        items: list[Item] = []
        first = 0
        for row in failed:
            items += [*_kept(block.slice(first, row), answers[first:row]), answers[row]]
            first = row + 1
        return items + _kept(block.slice(first, block.num_rows), answers[first:])


def ask_rows(predicate: Callable[..., Any], block: Block, start: int) -> tuple[list[Any], list[int]]:
    """Return `predicate` of every element, with an ElementError where it fails, and the rows of these errors.

    The predicate receives copies, so it cannot change the elements.
    """
    answers, failed = call_rows(predicate, block.shared(), start)
    if not set(map(type, answers)) <= {bool, np.bool_}:
        answers = [_truth(answer, start + row) for row, answer in enumerate(answers)]
        failed = [row for row, answer in enumerate(answers) if isinstance(answer, ElementError)]
    return answers, failed


def _kept(block: Block, answers: list[Any]) -> list[Item]:
    mask = np.array(answers, dtype=bool)
    if mask.all():
        return [block] if block.num_rows else []
    kept = np.flatnonzero(mask)
    return [block.take(kept)] if len(kept) else []


def _truth(answer: Any, index: int) -> bool | np.bool_ | ElementError:
    if isinstance(answer, ElementError):
        return answer
    try:
        leaf = as_leaf(answer)
    except SpecError:
        leaf = None
    if getattr(leaf, "dtype", None) == np.bool_ and np.ndim(leaf) == 0:
        return bool(leaf)
    return ElementError(SpecError(f"A predicate must return one bool, got {answer!r:.100}."), index)
