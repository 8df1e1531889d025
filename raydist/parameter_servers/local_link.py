"""A connection to a server in the same process, whose threads take turns."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.parameter_servers.desk import Outcome, ServerDesk
from raydist.parameter_servers.link import Awaited, Into, fill, pulled_by, too_late
from raydist.parameter_servers.requests import ServerAnswer, ServerRequest

__all__ = ["LocalDoor", "LocalLink"]


@final
class LocalLink:
    """A connection to a server of this process; threads may share one link, or have links of their own.

    Args:
        desk: The server's dispatcher.
        lock: The one lock of all links to this dispatcher.
        name: Name of the server, for messages.
    """

    def __init__(self, desk: ServerDesk, lock: threading.Lock, name: str = "parameter server 0") -> None:
        self.name = name
        self._desk = desk
        self._lock = lock

    def ask(self, request: ServerRequest, tensors: Sequence[torch.Tensor] = (), into: Into | None = None) -> Awaited:
        """Implement `ServerLink.ask`."""
        asked = _AskedHere(self.name)
        # The server may read tensors after this returns: it gets copies, as on every other connection.
        copies = [tensor.clone() for tensor in tensors]
        numbers = pulled_by(request)

        def tell(outcome: Outcome) -> None:
            if into is not None and outcome.error is None:
                fill(into, numbers, outcome.tensors)
                outcome = Outcome(outcome.answer)
            asked.settle(Outcome(outcome.answer, [tensor.clone() for tensor in outcome.tensors], outcome.error))

        with self._lock:
            self._desk.take(request, copies, tell)
        return asked

    def close(self) -> None:
        """Implement `ServerLink.close`; there is nothing to release."""


@final
class _AskedHere:
    def __init__(self, name: str) -> None:
        self._name = name
        self._there = threading.Event()
        self._outcome = Outcome(ServerAnswer())

    def settle(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._there.set()

    def answer(self, timeout_s: float) -> tuple[ServerAnswer, Sequence[torch.Tensor]]:
        if not self._there.wait(timeout_s):
            raise too_late(self._name, timeout_s)
        if self._outcome.error is not None:
            raise self._outcome.error
        return self._outcome.answer, self._outcome.tensors


@final
@dataclass(frozen=True, slots=True)
class LocalDoor:
    """An opener that returns an existing link.

    Attributes:
        link: The link.
    """

    link: LocalLink

    def open(self) -> LocalLink:
        """Implement `ServerDoor.open`."""
        return self.link
