"""The limit on consecutive operations: an iterator calls the iterator of its input, and Python's stack is limited."""

from __future__ import annotations

import sys

from raydist.errors import InvalidArgumentError
from raydist.pipelines.engine.op import DatasetOp

__all__ = ["explain_recursion", "require_short_chain"]

_FRAMES = 4  # of most operations; an interleave has the most, 10
_LONG = 50


def require_short_chain(op: DatasetOp) -> DatasetOp:
    """Return `op`, if the chain of operations up to it is short enough to run.

    Raises:
        InvalidArgumentError: The chain is too long. The message names the limit.
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
    """Add a note to `error` about the length of the pipeline."""
    if op.chain_length > _LONG:
        error.add_note(
            f"{op.chain_length} operations follow each other up to {op.label}: some need more of Python's stack than "
            "others. Use fewer, or raise sys.setrecursionlimit."
        )
