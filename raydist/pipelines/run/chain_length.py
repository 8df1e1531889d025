"""How many operations may follow each other: an iterator calls its input's, and Python's stack has an end."""

from __future__ import annotations

import sys

from raydist.errors import InvalidArgumentError
from raydist.pipelines.engine.op import DatasetOp

__all__ = ["explain_recursion", "require_short_chain"]

_FRAMES = 4  # of most operations; of an interleave, the longest of all, 10
_LONG = 50


def require_short_chain(op: DatasetOp) -> DatasetOp:
    """`op`, unless more operations follow each other up to it than can be run.

    Raises:
        InvalidArgumentError: Says how many may.
    """
    most = sys.getrecursionlimit() // _FRAMES
    if op.chain_length > most:
        raise InvalidArgumentError(
            f"At most {most} operations may follow each other (a quarter of sys.getrecursionlimit()), got "
            f"{op.chain_length} with {op.label}. Do several steps in one map, concatenate parts in pairs, or save what "
            "is made so far and load it."
        )
    return op


def explain_recursion(error: RecursionError, op: DatasetOp) -> None:
    """Note what the length of a pipeline may have to do with `error`."""
    if op.chain_length > _LONG:
        error.add_note(
            f"{op.chain_length} operations follow each other up to {op.label}: some need more of Python's stack than "
            "others. Use fewer, or raise sys.setrecursionlimit."
        )
