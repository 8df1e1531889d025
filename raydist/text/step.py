"""A step: a function of Arrow arrays that can be called with a string or with arrays of strings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, final

import pyarrow as pa

from raydist.text.convert import from_arrow, to_arrow

__all__ = ["TextStep"]


class TextStep(ABC):
    """One step. Subclasses are frozen dataclasses."""

    takes_lists: ClassVar[bool] = False
    """Whether an entry is a sequence: the last axis of an array without lists then holds the sequence."""

    @abstractmethod
    def apply(self, array: pa.Array) -> pa.Array:
        """One entry for each entry of `array`: text (large_string), int64, lists of either, or fixed-size lists."""

    @final
    def __call__(self, values: Any) -> Any:
        """The step for one string, an array (or list) of strings of any shape, or the result of another step.

        Raises:
            InvalidArgumentError: A string is not valid UTF-8; the message has its row.
            SpecError: `values` are nothing that this step takes.
        """
        array, shape = to_arrow(values, fold=self.takes_lists)
        return from_arrow(self.apply(array), shape)
