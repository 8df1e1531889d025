"""How often is looked for messages that many ends send one after the other. Only arithmetic."""

from __future__ import annotations

from raydist.crowds import is_crowd

__all__ = ["rest_s"]

_FEW = 8
_REST_S = 60e-6
# Sixty-four that share two cores take 25 ms to come from one group of steps to the next, and all wait for the last one:
# who looks for what they send is in their way, and their next steps do not wait for him.
_REST_IN_CROWD_S = 400e-6
_MOST_IN_CROWD_S = 12.8e-3


def rest_s(num_missing: int) -> float:
    """How long who has got one of so many messages leaves the cores to those that are to send the others.

    >>> rest_s(4)
    0.0
    >>> rest_s(100_000)
    0.0128
    """
    if num_missing <= _FEW:
        return 0.0
    return min(num_missing * _REST_IN_CROWD_S, _MOST_IN_CROWD_S) if is_crowd(num_missing) else num_missing * _REST_S
