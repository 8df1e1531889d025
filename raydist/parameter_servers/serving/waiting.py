"""Delayed answers: nothing blocks in a server; a request that must wait is answered later."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from raydist.parameter_servers.requests import ServerAnswer

__all__ = ["Answered", "Later", "Reply", "Waits"]

Answered = tuple[ServerAnswer, list[torch.Tensor]]
"""An answer and its tensors."""


@final
class Later:
    """A placeholder for a future answer. The transport keeps it until `due()` returns it."""

    __slots__ = ()


Reply = Answered | Later
"""The result of handling a request."""


@final
class Waits:
    """Waiting requests, in the order in which they came.

    >>> waits, gates = Waits(), []
    >>> later = waits.add(lambda: bool(gates), lambda: (ServerAnswer(), []))
    >>> waits.due()
    []
    >>> gates.append("open")
    >>> [(which is later, answered) for which, answered in waits.due()]
    [(True, (ServerAnswer(version=0, verdict='done', step=0, completes=0, value=None), []))]
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Later, Callable[[], bool], Callable[[], Answered]]] = []

    def add(self, ready: Callable[[], bool], answer: Callable[[], Answered]) -> Later:
        """Add a request that is answered once `ready()` is true.

        Args:
            ready: Returns True once the answer may be given.
            answer: Makes the answer then.
        """
        later = Later()
        self._waiting.append((later, ready, answer))
        return later

    def due(self) -> list[tuple[Later, Answered | Exception]]:
        """Return the answers that are ready, each once; an exception is to be raised at its request's sender."""
        ready = [entry for entry in self._waiting if entry[1]()]
        if ready:
            done = {id(entry) for entry in ready}
            self._waiting = [entry for entry in self._waiting if id(entry) not in done]
        return [(later, _answered(answer)) for later, _, answer in ready]

    def __len__(self) -> int:
        return len(self._waiting)


def _answered(answer: Callable[[], Answered]) -> Answered | Exception:
    try:
        return answer()
    except Exception as error:
        return error
