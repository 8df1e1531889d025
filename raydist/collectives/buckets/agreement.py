"""Agree on a few numbers beside other work: are all ranks doing the same thing?

A collective whose sizes differ between ranks does not raise: gloo ends the process, NCCL hangs. One of fixed size
before it turns that into an error that says what each rank was doing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import final

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.translation import describe_odd_ones
from raydist.errors import CollectiveMismatchError

__all__ = ["Agreement", "mismatch"]

BACKWARD_ADVICE = "Let all replicas call backward as often, on a loss that reaches the same parameters."


@final
class Agreement:
    """One exchange of named numbers that must be equal on all ranks.

    Args:
        communicator: Carries it; all ranks must start it at the same place in their sequence of collectives.
        what: What is agreed on, for the message.
        advice: What the message says is to be done.
        numbers: Name -> number, below 2**63; as many names on every rank.
        device: Where the communicator's tensors are.
    """

    def __init__(
        self,
        communicator: Communicator,
        what: str,
        numbers: dict[str, int],
        device: torch.device | None = None,
        *,
        advice: str,
    ) -> None:
        self._what = what
        self._advice = advice
        self._numbers = numbers
        mine = torch.tensor(list(numbers.values()), dtype=torch.int64, device=device)
        self._all = [torch.empty_like(mine) for _ in range(communicator.world_size)]
        self._work = communicator.all_gather(self._all, mine)

    def wait(self) -> None:
        """Return if all ranks agree.

        Blocking: until every rank has started it, at most the communicator's limit.

        Raises:
            CollectiveMismatchError: On every rank alike, with every rank's numbers.
        """
        self._work.wait()
        rows = [tuple(row.tolist()) for row in self._all]
        if len(set(rows)) > 1:
            raise mismatch(self._what, [dict(zip(self._numbers, row, strict=True)) for row in rows], self._advice)


def mismatch(what: str, said: Sequence[Mapping[str, Hashable]], advice: str) -> CollectiveMismatchError:
    """The error of ranks that disagree on `what`; `said` is what each of them holds, `advice` what is to be done.

    >>> mismatch("the time", [{"hour": 3}, {"hour": 4}], "Ask one clock.").message
    'All ranks must agree on the time, got rank 0: hour 3; rank 1: hour 4. Ask one clock.'
    """
    shown = (", ".join(f"{name} {value}" for name, value in held.items()) for held in said)
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(shown))
    listed += describe_odd_ones({rank: tuple(held.items()) for rank, held in enumerate(said)})
    return CollectiveMismatchError(f"All ranks must agree on {what}, got {listed}. {advice}")
