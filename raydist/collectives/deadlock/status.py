"""Where a rank stands in its program: written by the thread that runs the steps, read by any other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import final

import torch

__all__ = ["Progress", "RankStatus"]


@final
@dataclass(frozen=True, slots=True)
class RankStatus:
    """One look at a rank.

    Attributes:
        events: How often it has gone on to something else: two looks with one number have seen the same.
        step: The step that it runs, or ran last; -1 before the first.
        running: Whether that step is under way.
        calls: How many collectives it has called, for each of its groups.
        waits_in: The group in whose collective it waits; empty where it does not.
        number: The number of that collective in its group.
        doing: That collective, for messages.
        look: How often the rank was looked at before; of two looks the later one has the higher number.
    """

    events: int
    step: int = -1
    running: bool = False
    calls: Mapping[str, int] = field(default_factory=dict)
    waits_in: str = ""
    number: int = 0
    doing: str = ""
    look: int = 0

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> RankStatus:
        return RankStatus(**json.loads(data))

    def __str__(self) -> str:
        if self.waits_in:
            return f"waits in {self.doing} ({self.waits_in}, call {self.number}) in step {self.step}"
        if self.running:
            return f"is at work in step {self.step}"
        return "has run no step yet" if self.step < 0 else f"has ended step {self.step}"


@final
class Progress:
    """What a rank is doing. The marks cost a fraction of a microsecond: they are set around every collective.

    Attributes:
        events: How often it has gone on to something else.
        num_waits: How many waits for a collective are over.
    """

    def __init__(self) -> None:
        self.events = self.num_waits = 0
        self._num_looks = 0
        self.restart()

    def restart(self) -> None:
        """A new generation: collectives are counted anew."""
        self.events += 1
        self._step, self._running = -1, False
        self._calls: dict[str, int] = {}
        self._waits: tuple[str, int, str, torch.Tensor | None] | None = None

    def begin_step(self, step: int) -> None:
        self.events += 1
        self._step, self._running = step, True

    def end_step(self) -> None:
        self.events += 1
        self._running = False

    def call(self, group: str) -> int:
        """A collective of `group` has been called: its number."""
        self.events += 1
        number = self._calls.get(group, 0)
        self._calls[group] = number + 1
        return number

    def wait(self, group: str, number: int, name: str, tensor: torch.Tensor | None) -> None:
        """The rank waits for a collective, until `go_on`."""
        self.events += 1
        self._waits = (group, number, name, tensor)

    def go_on(self) -> None:
        self.events += 1
        self.num_waits += 1
        self._waits = None

    def look(self) -> RankStatus:
        """Where the rank stands; as at work where it moves on meanwhile."""
        events, waits, self._num_looks = self.events, self._waits, self._num_looks + 1
        status = RankStatus(events, self._step, self._running, dict(self._calls), look=self._num_looks)
        if waits is not None:
            group, number, name, tensor = waits
            about = "" if tensor is None else f" of {tensor.dtype} {tuple(tensor.shape)}"
            status = replace(status, waits_in=group, number=number, doing=name + about)
        return status if events == self.events else RankStatus(self.events, self._step, True, look=self._num_looks)
