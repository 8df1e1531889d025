"""Where processes outnumber cores so far that each should keep out of the others' way."""

from __future__ import annotations

from raydist.pipelines.engine.machine import num_cores

__all__ = ["is_crowd"]

_MOST_A_CORE = 2


def is_crowd(num_processes: int) -> bool:
    """Whether so many processes that wait for each other are too many for this one's cores.

    >>> is_crowd(1), is_crowd(100_000)
    (False, True)
    """
    return num_processes > _MOST_A_CORE * num_cores()
