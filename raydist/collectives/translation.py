"""Translation of torch.distributed's errors to raydist's errors, and common parts of messages.

gloo, NCCL and the TCPStore raise RuntimeErrors that differ in their text only. No other module parses this text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from raydist.collectives.base import Membership
from raydist.core.errors import (
    CancelledError,
    CollectiveMismatchError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    RaydistError,
    UnavailableError,
)

# The first pattern that matches decides. gloo reports "timeout caused pair closure" after an earlier time-out.
_PATTERNS: tuple[tuple[re.Pattern[str], type[RaydistError]], ...] = (
    (re.compile(r"timed out|time-?out", re.IGNORECASE), DeadlineExceededError),
    (re.compile(r"aborted|was cancelled", re.IGNORECASE), CancelledError),
    (
        re.compile(r"closed|reset by peer|broken pipe|refused|connect|remote process|shutdown or crash", re.IGNORECASE),
        UnavailableError,
    ),
    (
        re.compile(r"invalid scalar type|unsupported|not support|must be|expect|not implemented", re.IGNORECASE),
        InvalidArgumentError,
    ),
)


def describe_operation(membership: Membership, operation: str) -> str:
    """Return operation and rank for messages: `all_reduce by rank 1 of 4 (group 'g', generation 0)`."""
    return (
        f"{operation} by rank {membership.rank} of {membership.world_size} "
        f"(group {membership.group!r}, generation {membership.generation})"
    )


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def describe_odd_ones(kinds: Mapping[int, Hashable]) -> str:
    """Return a clause on the ranks that differ from the majority; empty if there is no majority.

    >>> describe_odd_ones({0: "a", 1: "a", 2: "b"}), describe_odd_ones({0: "a", 1: "b"})
    ('; rank 2 differs from the others', '')
    """
    kind, count = Counter(kinds.values()).most_common(1)[0]
    odd = sorted(rank for rank, other in kinds.items() if other != kind)
    if not odd or 2 * count <= len(kinds):
        return ""
    return f"; {describe_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from the others"


def describe_each(said: Sequence[str], who: str = "rank") -> str:
    """Return what each rank said, in rank order, with a clause on the ranks that differ from the majority.

    >>> describe_each(["a", "a", "b"])
    'rank 0: a; rank 1: a; rank 2: b; rank 2 differs from the others'
    """
    listed = "; ".join(f"{who} {rank}: {text}" for rank, text in enumerate(said))
    return listed + describe_odd_ones(dict(enumerate(said)))


def mismatch_error(calls: Sequence[str]) -> CollectiveMismatchError:
    """Return the error for ranks with different calls, given in rank order."""
    return CollectiveMismatchError(
        f"All replicas must call the same collectives with equal shapes and dtypes, got {describe_each(calls)}. "
        "Look for a branch that only some replicas take."
    )


def late_error(
    membership: Membership, operation: str, limit_s: float, *, fatal: bool, details: str = ""
) -> DeadlineExceededError:
    """Return the error for a wait that has taken too long; `fatal` if the limit is the group's own."""
    message = f"{describe_operation(membership, operation)} timed out after {limit_s} s."
    if not fatal:
        return DeadlineExceededError(f"{message} It goes on; wait again, or allow more time.")
    advice = "Raise the limit (Timeouts.collective_s) if the others were only slow."
    return DeadlineExceededError(f"{message}{details} {advice}")


def closed_error(membership: Membership, operation: str) -> FailedPreconditionError:
    """Return the error for an operation of a group that this rank has left."""
    return FailedPreconditionError(f"{describe_operation(membership, operation)}: the group is closed. Open a new one.")


def aborted_error(membership: Membership) -> CancelledError:
    """Return the error with which a rank aborts its group."""
    group = f"group {membership.group!r}, generation {membership.generation}"
    return CancelledError(f"rank {membership.rank} aborted {group}.")


def is_slice_over(error: RuntimeError) -> bool:
    """Return True if `error` only means that a slice of a wait has timed out, while the work goes on."""
    return "Operation timed out!" in str(error)


def translate_torch_error(error: BaseException, membership: Membership, operation: str) -> RaydistError:
    """Return raydist's error for an error of torch.distributed."""
    if isinstance(error, RaydistError):
        return error
    text = str(error).strip().split("\n")[0]
    kind = next((kind for pattern, kind in _PATTERNS if pattern.search(text)), UnavailableError)
    return kind(f"{describe_operation(membership, operation)} failed: {text}")
