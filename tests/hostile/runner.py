"""Runs the attacked process, and a new one behind every copy that ends it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from tests.resuming.lives import Lines

__all__ = ["Attacker", "Report"]

MEMORY_BYTES = 64 << 20
"""What reading may take beyond the size of the file."""

_STEP_S = 20.0  # for one copy; the longest seen takes 0.1 s
_START_S = 120.0
_ROOT = Path(__file__).parents[2]


@final
@dataclass
class Report:
    """How often each outcome was seen (a type of error, "same" or "other" elements, a bad one), and what was bad."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    most_memory: int = 0

    def add(self, number: int, outcome: str, words: str, used: int = 0) -> None:
        self.counts[outcome] += 1
        self.most_memory = max(self.most_memory, used)
        if outcome in ("raw", "silent", "crash", "hang"):
            self.bad.append(f"copy {number}: {outcome}: {words}")
        elif used > MEMORY_BYTES:
            self.counts["memory"] += 1
            self.bad.append(f"copy {number}: {used >> 20} MiB: {words}")


@final
class Attacker:
    """The attacked process: started when it is first needed, and again behind every copy that ends it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts = 0
        self._child: subprocess.Popen[str] | None = None

    def attack(self, name: str, count: int) -> Report:
        """Copies 0 .. `count` - 1 of a case."""
        report = Report()
        first = 0
        while first < count:
            first = self._run(name, first, count, report)
        return report

    def _run(self, name: str, first: int, end: int, report: Report) -> int:
        """Work through copies until the process ends; the number of the next one."""
        child = self._started()
        folder = self._folder / f"{name}-{first}"
        folder.mkdir()
        assert child.stdin is not None
        child.stdin.write(json.dumps([name, first, end, str(folder)]) + "\n")
        child.stdin.flush()
        at, left, outcome = -1, _START_S, "crash"
        try:
            while line := self._lines.next(left):
                if line == "end":
                    return end
                if line.startswith("begin "):
                    at, left = int(line.split()[1]), _STEP_S
                elif line.startswith("["):
                    report.add(*json.loads(line))
        except TimeoutError:
            outcome = "hang"
        code, said = self.close(), self._stderr.read_text()[-1000:]
        if at < 0:
            raise AssertionError(f"the good file of {name} must be read, but the process ended ({code}): {said}")
        report.add(at, outcome, f"code {code}: {said}")
        return at + 1

    @property
    def _stderr(self) -> Path:
        return self._folder / f"stderr-{self._starts}"

    def _started(self) -> subprocess.Popen[str]:
        if self._child is not None:
            return self._child
        self._starts += 1
        command = [sys.executable, "-m", "tests.hostile.child"]
        with self._stderr.open("wb") as stderr:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=_ROOT,
                env=_environment(),
            )
        assert child.stdout is not None
        self._child, self._lines = child, Lines(child.stdout)
        return child

    def close(self) -> int:
        """End the process; its exit code. May be called twice."""
        child, self._child = self._child, None
        if child is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.2)  # one that is ending by itself has a code of its own
        child.kill()
        code = child.wait(timeout=_STEP_S)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        return code


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
