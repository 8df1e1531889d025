"""The process of one contender: `python -m benchmarks.pipelines.worker MODULE DISTRIBUTION`.

Its standard input brings one JSON object a line. One that describes a scene: prepare it, and read everything once
untimed if `warm_up` says so. An empty one: a timed pass. Each is answered by one JSON object a line on what was its
standard output; what libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from benchmarks.pipelines.scene import MakePass, Pass, Scene

Answer = dict[str, Any]


class Worker:
    """Answers requests; keeps the scene of the last workload open until the next one, or `close`.

    Args:
        find_passes: Gives the contender's passes; called by the first request, so that its failure is an answer.
        version: Of the contender's library.
    """

    def __init__(self, find_passes: Callable[[], Mapping[str, MakePass]], version: Callable[[], str]) -> None:
        self._find_passes = find_passes
        self._version = version
        self._scene: Scene | None = None
        self._read: Pass | None = None

    def answer(self, request: Mapping[str, Any]) -> Answer:
        """Do what is asked; an error is an answer too."""
        try:
            return self._pass() if not request else self._prepare(**request)
        except Exception as error:
            traceback.print_exc()
            message = str(error).partition("\n")[0]
            return {"problem": f"{type(error).__name__}: {message}"}

    def close(self) -> None:
        """End servers, clusters and strategies of the last workload."""
        scene, self._scene, self._read = self._scene, None, None
        if scene is not None:
            scene.resources.close()

    def _prepare(
        self, *, workload: str, folder: str, rows: int, num_workers: int, num_calls: int | None, warm_up: bool
    ) -> Answer:
        self.close()
        self._scene = Scene(Path(folder), rows, num_workers, num_calls)
        self._read = self._find_passes()[workload](self._scene)
        if warm_up:
            self._read()
        return {"version": self._version()}

    def _pass(self) -> Answer:
        if self._read is None:
            raise AssertionError("A pass needs a workload that was prepared.")
        start = time.perf_counter()
        result = self._read()
        return {"result": result, "seconds": time.perf_counter() - start}


def passes_of(module: str) -> Mapping[str, MakePass]:
    """`PASSES` of a module of `benchmarks.pipelines.peers`."""
    passes: Mapping[str, MakePass] = importlib.import_module(f"benchmarks.pipelines.peers.{module}").PASSES
    return passes


def own_standard_output() -> IO[str]:
    """Standard output for the answers alone; from here on file descriptor 1 is standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


class Answering(Protocol):
    """What `serve` asks."""

    def answer(self, request: Mapping[str, Any]) -> Answer:
        """Do what is asked; an error is an answer too."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


def serve(worker: Answering) -> None:
    """Answer line by line until standard input ends."""
    answers = own_standard_output()
    try:
        for line in sys.stdin:
            print(json.dumps(worker.answer(json.loads(line))), file=answers)
    finally:
        worker.close()


def main() -> None:
    module, distribution = sys.argv[1:]
    serve(Worker(lambda: passes_of(module), lambda: importlib.metadata.version(distribution)))


if __name__ == "__main__":
    main()
