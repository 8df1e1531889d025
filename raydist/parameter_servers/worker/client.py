"""One process's connections to all servers, which handle its requests at the same time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from raydist.errors import DeadlineExceededError
from raydist.parameter_servers.connection import ServerConnection, Targets
from raydist.parameter_servers.requests import Pull, Sender, ServerAnswer, ServerRequest

__all__ = ["Ask", "ServerClient"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A request to one server.

    Attributes:
        request: The request.
        tensors: See `ServerConnection.ask`.
        into: See `ServerConnection.ask`.
    """

    request: ServerRequest
    tensors: Sequence[torch.Tensor] = ()
    into: Targets | None = None


Answers = dict[int, tuple[ServerAnswer, Sequence[torch.Tensor]]]


@final
class ServerClient:
    """The connections to all servers, for one thread.

    Args:
        connections: The connections to all servers, in their order.
        sender: The sender of the requests.
        timeout_s: Time limit for an answer.
    """

    def __init__(self, connections: Sequence[ServerConnection], sender: Sender, *, timeout_s: float) -> None:
        self.sender = sender
        self.num_servers = len(connections)
        self._connections = tuple(connections)
        self._timeout_s = timeout_s

    def exchange(self, asks: Mapping[int, Ask]) -> Answers:
        """Send requests to servers, by number; wait for all, and return their answers.

        Raises:
            Exception: The error of the first server that failed, after all others have answered.
        """
        asked = {
            server: self._connections[server].ask(ask.request, ask.tensors, ask.into) for server, ask in asks.items()
        }
        answers: Answers = {}
        failed: Exception | None = None
        for server, each in asked.items():
            try:
                answers[server] = each.answer(self._timeout_s)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return answers

    def ask(self, server: int, request: ServerRequest) -> ServerAnswer:
        """Send a request without tensors to one server."""
        return self.exchange({server: Ask(request)})[server][0]

    def ask_all(self, request: ServerRequest) -> list[ServerAnswer]:
        """Send the same request to all servers."""
        answers = self.exchange({server: Ask(request) for server in range(self.num_servers)})
        return [answers[server][0] for server in range(self.num_servers)]

    def read(self, wanted: Mapping[int, Targets], unless: Mapping[int, int] | None = None) -> dict[int, ServerAnswer]:
        """Copy present values, from each server all of one version, without waiting for any step.

        Args:
            wanted: By server, the targets of slices.
            unless: By server, the version held already: nothing is copied if the server still has this version.

        Returns:
            By server, an answer with the version of the values.
        """
        held = unless or {}
        asks = {
            server: Ask(Pull(tuple(into), unless=held.get(server, -1)), into=into)
            for server, into in wanted.items()
            if into
        }
        return {server: answer for server, (answer, _) in self.exchange(asks).items()}

    def read_step(self, wanted: Mapping[int, Targets], at_least: int) -> dict[int, ServerAnswer]:
        """Copy values like `read`, but of one synchronous step, the same on all servers.

        Args:
            wanted: By server, the targets of slices. The call waits for all servers.
            at_least: The step; a later one will do.

        Raises:
            DeadlineExceededError: The servers never were at the same step.
        """
        answers: dict[int, ServerAnswer] = {}
        waiting = list(range(self.num_servers))
        end = time.monotonic() + self._timeout_s
        while waiting:
            if time.monotonic() > end:
                raise DeadlineExceededError(
                    f"Servers must rest for as long as it takes to read one step from all of them, but went on for "
                    f"{self._timeout_s:g} s. Let steps take longer, or use one server."
                )
            answers |= self._read_waiting({server: wanted.get(server, {}) for server in waiting}, at_least)
            at_least = max(answer.step for answer in answers.values())
            waiting = [server for server, answer in answers.items() if answer.step < at_least]
        return answers

    def _read_waiting(self, wanted: Mapping[int, Targets], at_least: int) -> dict[int, ServerAnswer]:
        pull = Pull((), self.sender, at_least_step=at_least)
        asks = {server: Ask(replace(pull, slices=tuple(into)), into=into) for server, into in wanted.items()}
        return {server: answer for server, (answer, _) in self.exchange(asks).items()}
