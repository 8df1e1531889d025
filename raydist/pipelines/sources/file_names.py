"""The files that a reader is to read: given names, or a dataset of names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from raydist.errors import InvalidArgumentError, SpecError
from raydist.nest import LEAF
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.elements.spec import STR, TensorSpec
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.resume import read_items
from raydist.pipelines.formats.files import path_text
from raydist.pipelines.sources.memory import MemoryOp

__all__ = ["FileNames", "names_op"]


def names_op(filenames: Any) -> DatasetOp:
    """The operation that yields the file names: `filenames` itself where it is one.

    Raises:
        SpecError: It is neither a path, a list of paths nor a dataset of str.
        InvalidArgumentError: The list is empty.
    """
    if isinstance(filenames, DatasetOp):
        return filenames
    if isinstance(filenames, np.ndarray):
        filenames = filenames.tolist()
    paths = (
        list(filenames) if isinstance(filenames, Sequence) and not isinstance(filenames, str | bytes) else [filenames]
    )
    if not paths:
        raise InvalidArgumentError("filenames must name at least one file, got an empty list. Check what made it.")
    column = np.array([path_text(path) for path in paths], dtype=object)
    return MemoryOp(Block(LEAF, (TensorSpec((), STR),), (column,), len(paths)), "filenames")


@final
class FileNames:
    """Takes file names one by one.

    Attributes:
        num_taken: Names (and errors in the place of names) taken so far.
    """

    def __init__(self, names: OpIterator) -> None:
        self.num_taken = 0
        self._names = names

    def take(self) -> str:
        """The next name.

        Raises:
            StopIteration: There is none.
            Exception: The error of the dataset of names at this place.
        """
        try:
            block = self._names.next_block(1)
        except StopIteration:
            raise
        except Exception:
            self.num_taken += 1
            raise
        self.num_taken += 1
        value = block.row(0)
        if not isinstance(value, str | bytes):
            raise SpecError(f"A dataset of file names must have elements of str, got {value!r:.100}.")
        return path_text(value)

    def retake(self, num_taken: int, wanted: Sequence[int]) -> dict[int, str | ElementError]:
        """On fresh names: take `num_taken` of them again, and return those (or errors) of the `wanted` numbers."""
        found: dict[int, str | ElementError] = {}
        for item in read_items(self._names, num_taken):
            size = item.num_rows if isinstance(item, Block) else 1
            for number in wanted:
                if self.num_taken <= number < self.num_taken + size:
                    row = number - self.num_taken
                    found[number] = path_text(item.row(row)) if isinstance(item, Block) else item
            self.num_taken += size
        return found

    def close(self) -> None:
        """Close the dataset of names."""
        self._names.close()
