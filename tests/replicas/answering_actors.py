"""Replicas that answer in this process, in the place of actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from raydist.actors.supervision import root_cause
from raydist.actors.version_check import Software, installed_software
from raydist.core.errors import CancelledError
from raydist.mirroring.messages import StepPayload
from raydist.replicas.results import StepOutcome, pack_result
from raydist.replicas.step import StepHeader
from raydist.replicas.step_message import GroupResult, PlannedStep, StepMessage


class Actors:
    """Two replicas; a step returns its number, but for the one that fails on a replica."""

    names = ("replica 0", "replica 1")

    def __init__(self) -> None:
        self.messages: list[tuple[int, list[int]]] = []
        self.calls: list[str] = []
        self.aborted: list[int] = []
        self.failing: tuple[int, int] | None = None  # step, rank
        self.broken = False
        self.ready = True
        self.interrupted = False  # while replica 1 is sent something
        self.remarks: tuple[str, ...] = ()
        self.software: dict[int, Software] = {}

    def about(self, rank: int) -> Any:
        return self.software.get(rank, installed_software())

    def start(self, rank: int, make_runner: Callable[..., Any], *args: Any) -> Any:
        return "started"

    def call(self, rank: int, method: str, *args: Any) -> Any:
        self.calls.append(method)
        self.broken = self.broken and method != "join"
        return method

    def control_all(self, method: str, *args: Any) -> None:
        self.calls.append(method)
        self.aborted += args

    def send(self, rank: int, message: StepMessage, objects: Sequence[Any]) -> GroupResult:
        if self.interrupted and rank == 1:
            raise KeyboardInterrupt
        results, error = [], None
        for header in message.steps():
            if (header.step, rank) == self.failing or (self.broken and rank == 0):
                error = error or (CancelledError("refused") if self.broken else ValueError(f"step {header.step}"))
                self.broken = True
            if error is None:
                results.append(pack_result((header.step, rank), absent=False))
        self.messages.append((rank, [header.step for header in message.steps()]))
        return GroupResult(tuple(results), 0.001 * len(results), error, () if rank else self.remarks)

    def wait(
        self, refs: Sequence[Any], names: Sequence[str], *, on_error: Callable[[], None], **limits: Any
    ) -> list[Any]:
        errors = [ref.error for ref in refs if isinstance(ref, GroupResult) and ref.error is not None]
        if errors:
            on_error()
            raise root_cause([error for error in errors if isinstance(error, Exception)])
        return list(refs)

    def done_before_failure(self, refs: Sequence[Any]) -> list[Any]:
        return list(refs)

    def are_ready(self, refs: Sequence[Any], within_s: float) -> bool:
        return self.ready

    def discard(self, refs: Sequence[Any]) -> None:
        self.calls.append("discard")

    def kill(self) -> None:
        self.calls.append("kill")


@pytest.fixture
def actors() -> Actors:
    return Actors()


def planned(step: int) -> PlannedStep:
    return PlannedStep(StepHeader(step, 0, StepPayload(digest=b"step")))


def values(outcome: StepOutcome) -> list[Any]:
    return [result.leaf(0) for result in outcome.results()]
