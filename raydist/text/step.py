"""A step: a function of Arrow arrays that can be called with a string or with arrays of strings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, final

import pyarrow as pa

from raydist.text.convert import from_arrow, to_arrow

__all__ = ["TextStep"]


class TextStep(ABC):
    """One step: called with text, or with what another step made. Subclasses are frozen dataclasses with an `apply`.

    Attributes:
        takes_lists: Whether an entry is a sequence.

    >>> import pyarrow.compute as pc
    >>> class Lower(rd.text.TextStep):
    ...     def apply(self, array):
    ...         return pc.utf8_lower(array)
    >>> Lower()(["Dog", "CAT"]).tolist()
    ['dog', 'cat']
    """

    takes_lists: ClassVar[bool] = False
    """Whether an entry is a sequence: the last axis of an array without lists then holds the sequence."""

    @abstractmethod
    def apply(self, array: pa.Array) -> pa.Array:
        """The step on Arrow entries: what a call does between making Arrow of its argument and numpy of the result.

        Args:
            array: Text (large_string), int64, lists of either, or fixed-size lists.

        Returns:
            One entry of such a kind for each entry of `array`.

        Raises:
            SpecError: Entries of a kind that this step does not take.

        >>> import pyarrow as pa
        >>> rd.text.Split().apply(pa.array(["a b"], pa.large_string())).to_pylist()
        [['a', 'b']]
        """

    @final
    def __call__(self, values: Any) -> Any:
        """The step for one string, an array (or list) of strings of any shape, or the result of another step.

        Args:
            values: str, bytes that hold UTF-8, ids, or arrays of them.

        Returns:
            The same shape, with one entry for each: numbers as an int64 array, texts as an object array of str,
            sequences as an object array of arrays (`PadTo`: as a further axis). For one string: its entry alone.

        Raises:
            InvalidArgumentError: A string is not valid UTF-8; the message has its row.
            SpecError: `values` are nothing that this step takes.
        """
        array, shape = to_arrow(values, fold=self.takes_lists)
        return from_arrow(self.apply(array), shape)
