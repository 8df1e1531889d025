"""The process of one contender: `python -m benchmarks.steps.worker MODULE`.

Its standard input brings one JSON object a line: one that names a workload prepares it; one that names a run repeats
that for as long as the workload's passes are. Answers are JSON objects, too.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pipelines.worker import Answer, serve
from benchmarks.processes import read_processes
from benchmarks.steps.cpu import between, by_kind
from benchmarks.steps.scene import MakeRuns, Run, Scene, repetitions


class StepWorker:
    """Answers requests; keeps the scene of the last workload open until the next one, or `close`.

    Args:
        module: The contender's, in full; imported by the first request, so that its failure is an answer.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._scene: Scene | None = None
        self._runs: Mapping[str, Run] = {}
        self._counts: dict[str, int] = {}

    def answer(self, request: Mapping[str, Any]) -> Answer:
        """Do what is asked; an error is an answer too."""
        try:
            return self._pass(request["run"]) if "run" in request else self._prepare(**request)
        except Exception as error:
            traceback.print_exc()
            return {"problem": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}

    def close(self) -> None:
        """End what the last workload started."""
        scene, self._scene, self._runs, self._counts = self._scene, None, {}, {}
        if scene is not None:
            scene.resources.close()

    def _prepare(self, *, workload: str, folder: str, ranks: int, target_s: float, servers: int = 0) -> Answer:
        self.close()
        self._scene = Scene(workload, Path(folder), ranks, target_s, servers)
        self._runs = self._make_runs()(self._scene)
        return {"runs": sorted(self._runs)}

    def _make_runs(self) -> MakeRuns:
        make: MakeRuns = importlib.import_module(self._module).make_runs
        return make

    def _pass(self, name: str) -> Answer:
        """The first one of each name finds out how many repetitions make a pass; its figures mean nothing."""
        if self._scene is None:
            raise AssertionError("A pass needs a workload that was prepared.")
        run = self._runs[name]
        if name not in self._counts:
            self._counts[name] = repetitions(run, self._scene.target_s)
            return {}
        count = self._counts[name]
        before = by_kind(os.getpid(), read_processes())
        seconds = run(count)
        after = by_kind(os.getpid(), read_processes())
        return {"ms": 1000 * seconds / count, "count": count, "cpu": between(before, after, count)}


def main() -> None:
    (module,) = sys.argv[1:]
    serve(StepWorker(module))


if __name__ == "__main__":
    main()
