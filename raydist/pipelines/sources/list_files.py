"""Dataset.list_files: the names of the files that match a pattern."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from typing import Any

import numpy as np

from raydist.errors import InvalidArgumentError, NotFoundError
from raydist.nest import LEAF
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.spec import STR, TensorSpec
from raydist.pipelines.formats.files import file_errors, local_path, path_text
from raydist.pipelines.formats.remote_file import open_system
from raydist.pipelines.sources.memory import MemoryOp

__all__ = ["list_files_op", "matching_files"]


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
