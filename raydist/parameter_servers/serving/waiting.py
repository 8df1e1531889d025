"""Answers that are given later: nothing blocks in a server, who must wait is answered when it may be."""

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
    """The place of an answer that is still to come. Whoever carries it keeps it until `due()` gives it back."""

    __slots__ = ()


Reply = Answered | Later
"""What handling a request gives."""


@final
class Waits:
    """Requests that wait, in the order in which they came.

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
        """Answer once something holds.

        Args:
            ready: Whether it does.
            answer: The answer, made then.
        """
        later = Later()
        self._waiting.append((later, ready, answer))
        return later

    def due(self) -> list[tuple[Later, Answered | Exception]]:
        """What may be answered by now, each once; an exception is to be raised where its request came from."""
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
