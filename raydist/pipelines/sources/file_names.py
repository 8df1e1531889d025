"""Names of files: Dataset.list_files, and the names that datasets of records read."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from typing import Any

import numpy as np

from raydist.core.errors import InvalidArgumentError, NotFoundError, SpecError
from raydist.core.nest import LEAF
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.elements.spec import STR, TensorSpec
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.resume import read_items
from raydist.pipelines.formats.files import file_errors, local_path, path_text
from raydist.pipelines.formats.remote_file import open_system
from raydist.pipelines.sources.memory import MemoryOp


def list_files_op(pattern: Any) -> MemoryOp:
    """Return a source of the names that match now, sorted."""
    patterns = list(pattern) if isinstance(pattern, Sequence) and not isinstance(pattern, str | bytes) else [pattern]
    if not patterns:
        raise InvalidArgumentError(
            "list_files needs at least one pattern, got an empty list. Give a path, or a list of them."
        )
    found = sorted({name for one in patterns for name in matching_files(path_text(one))})
    if not found:
        raise NotFoundError(
            f"At least one file must match, but none matches {pattern!r}. Check the pattern (* ? [...]), and that this "
            "node sees the files."
        )
    block = Block(LEAF, (TensorSpec((), STR),), (np.array(found, dtype=object),), len(found))
    return MemoryOp(block, "list_files")


def matching_files(pattern: str) -> list[str]:
    """Return files and directories whose name matches `pattern`: local paths, or URIs of the pattern's scheme."""
    local = local_path(pattern)
    if local is not None:
        prefix = pattern.removesuffix(local)
        return [prefix + name for name in glob.glob(local)]
    with file_errors(pattern):
        try:
            system, inner = open_system(pattern)
        except ValueError as error:
            raise InvalidArgumentError(
                f"The scheme of a pattern must be one that fsspec knows, got {pattern!r}: {error}."
            ) from error
        return [system.unstrip_protocol(name) for name in system.glob(inner)]


def names_op(filenames: Any) -> DatasetOp:
    """Return the operation that yields the file names: `filenames` itself if it is one.

    Raises:
        SpecError: `filenames` is neither a path, a list of paths nor a dataset of str.
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


class FileNames:
    """A reader of file names, one at a time.

    Attributes:
        num_taken: Number of names (and errors in place of names) so far.
    """

    def __init__(self, names: OpIterator) -> None:
        self.num_taken = 0
        self._names = names

    def take(self) -> str:
        """Return the next name.

        Raises:
            StopIteration: No name is left.
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
        """Take `num_taken` names again from a new dataset; return the names (or errors) with `wanted` numbers."""
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
        self._names.close()
