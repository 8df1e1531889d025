"""Processes that a contender's own process tells what to do: each blocks on a socket meanwhile, and costs nothing."""

from __future__ import annotations

import multiprocessing.connection
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.steps.scene import Run, Scene

Make = Callable[[str, str], Mapping[str, Run]]
"""Of a workload's name and a folder."""


class Ranks:
    """The contender's end. Requests go to all ranks at once; the slowest one's answer counts.

    Args:
        scene: What closes the connections, and ends the ranks by that.
        count: How many ranks there are.
    """

    def __init__(self, scene: Scene, count: int) -> None:
        self._scene = scene
        self._count = count
        folder = scene.resources.enter_context(tempfile.TemporaryDirectory())
        self.address = str(Path(folder) / "socket")
        self._listener = multiprocessing.connection.Listener(self.address, "AF_UNIX", backlog=count)
        self._connections: list[multiprocessing.connection.Connection[Any, Any]] = []

    def accept(self) -> None:
        """Wait for all ranks (the limit is the one of the contender's answer)."""
        for _ in range(self._count):
            connection = self._listener.accept()
            self._connections.append(connection)
            self._scene.resources.callback(connection.close)
        self._listener.close()

    def prepare(self, workload: str, folder: Path) -> None:
        """Let every rank make its runs."""
        self._ask(("prepare", workload, str(folder)))

    def run(self, name: str) -> Run:
        """A run of all ranks at the same time."""
        return lambda count: max(self._ask(("run", name, count)))

    def _ask(self, request: tuple[Any, ...]) -> list[float]:
        for connection in self._connections:
            connection.send(request)
        return self.answers()

    def answers(self) -> list[float]:
        """What the ranks send next."""
        answers = [connection.recv() for connection in self._connections]
        problems = [answer for answer in answers if isinstance(answer, str)]
        if problems:
            raise RuntimeError(problems[0])
        return answers


def serve_rank(address: str, make: Make) -> None:
    """A rank's end: do what is asked until the contender closes."""
    runs: Mapping[str, Run] = {}
    with multiprocessing.connection.Client(address, "AF_UNIX") as connection:
        while True:
            try:
                kind, name, argument = connection.recv()
            except EOFError:
                return
            try:
                if kind == "prepare":
                    runs = make(name, argument)
                    answer: float | str = 0.0
                else:
                    answer = runs[name](argument)
            except Exception as error:
                traceback.print_exc()
                answer = f"{type(error).__name__}: {error}"
            connection.send(answer)
