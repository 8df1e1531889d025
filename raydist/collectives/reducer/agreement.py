"""Agreement of all ranks on a few numbers, exchanged on the host: whether all of them do the same."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence

from raydist.collectives.base import Communicator
from raydist.collectives.translation import describe_odd_ones
from raydist.errors import CollectiveMismatchError

__all__ = ["BACKWARD_ADVICE", "agree", "mismatch"]

BACKWARD_ADVICE = "Let all replicas call backward as often, on a loss that reaches the same parameters."


def agree(communicator: Communicator, what: str, numbers: Mapping[str, int], advice: str) -> None:
    """Return if all ranks hold the same numbers.

    Args:
        communicator: Carries them.
        what: What is agreed on, for messages.
        numbers: By name.
        advice: What the message says is to be done.

    Blocking: until all ranks call it, at most the communicator's limit.

    Raises:
        CollectiveMismatchError: On every rank alike, with every rank's numbers.
    """
    rows = [json.loads(row) for row in communicator.exchange_on_host(json.dumps(dict(numbers)).encode(), what)]
    if any(row != rows[0] for row in rows):
        raise mismatch(what, rows, advice)


def mismatch(what: str, said: Sequence[Mapping[str, Hashable]], advice: str) -> CollectiveMismatchError:
    """Return the error of ranks that disagree on `what`; `said` is what each of them holds.

    >>> mismatch("the time", [{"hour": 3}, {"hour": 4}], "Ask one clock.").message
    'All ranks must agree on the time, got rank 0: hour 3; rank 1: hour 4. Ask one clock.'
    """
    shown = (", ".join(f"{name} {value}" for name, value in held.items()) for held in said)
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(shown))
    listed += describe_odd_ones({rank: tuple(held.items()) for rank, held in enumerate(said)})
    return CollectiveMismatchError(f"All ranks must agree on {what}, got {listed}. {advice}")
