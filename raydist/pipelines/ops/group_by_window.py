"""Dataset.group_by_window: datasets that a function makes from windows of elements with one key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.pipelines.elements.functions import function_label
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.producers import BorderIterator
from raydist.pipelines.ops.cycle import Cycle
from raydist.pipelines.ops.keyed_windows import KeyedWindowsOp
from raydist.pipelines.ops.nested import Opener, probe_nested
from raydist.pipelines.ops.take import TakeOp
from raydist.values import UNKNOWN_CARDINALITY

__all__ = ["GroupByWindowOp"]

_WHOLE = 1 << 62  # a turn that lasts until its dataset ends


@final
@dataclass(frozen=True, eq=False)
class GroupByWindowOp(DatasetOp):
    """The elements of the datasets `reduce_func(key, window)`, one window after the other.

    `known_spec` returns the element_spec; without it, a first element is reduced to find out.

    The state of an iterator is the number of windows before the open one, and the state of the open window's dataset.
    """

    windows: KeyedWindowsOp
    reduce_func: Callable[[Any, Any], Any]
    made_by: str = "group_by_window"
    known_spec: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        if not callable(self.reduce_func):
            raise InvalidArgumentError(f"reduce_func must be a function, got {self.reduce_func!r:.100}.")

    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (self.windows,)

    @property
    def name(self) -> str:
        return self.made_by

    @property
    def label(self) -> str:
        return f"{self.made_by}({function_label(self.reduce_func)})"

    @property
    def has_declared_shapes(self) -> bool:
        return False

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        if self.known_spec is not None:
            return self.known_spec()
        return probe_nested(self.windows.input, self._reduce_first, self.label)

    def _reduce_first(self, *element: Any) -> Any:
        """Reduce a window of the first element alone: waiting for a full window might mean reading everything."""
        windows = self.windows
        key = np.int64(windows.key_func(*element))
        return self.reduce_func(key, windows.make_dataset(TakeOp(windows.input, 1)))

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        opener = Opener(ctx.build(self.windows), self.reduce_func, ctx, ctx.operation_names[id(self)])
        return BorderIterator(Cycle(opener, length=1, block_length=_WHOLE))
