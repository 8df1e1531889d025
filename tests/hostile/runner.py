"""Runs the attacked process, and a new one behind every copy that ends it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

__all__ = ["Report", "attack"]

MEMORY_BYTES = 64 << 20
"""What reading may take beyond the size of the file."""

_STEP_S = 20.0  # for one copy; the longest seen takes 0.1 s
_START_S = 120.0
_ROOT = Path(__file__).parents[2]


@final
@dataclass
class Report:
    """What became of the copies of one case.

    Attributes:
        counts: How often each outcome was seen: a type of error, "same" or "other" elements, or one of the bad ones.
        bad: Copies that were not survived, or raised what is not raydist's, or were not noticed, or took much memory.
        most_memory: Beyond the file, of all copies.
    """

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    most_memory: int = 0

    def add(self, number: int, outcome: str, words: str, used: int = 0) -> None:
        """Note one copy."""
        self.counts[outcome] += 1
        self.most_memory = max(self.most_memory, used)
        if outcome in ("raw", "silent", "crash", "hang"):
            self.bad.append(f"copy {number}: {outcome}: {words}")
        elif used > MEMORY_BYTES:
            self.counts["memory"] += 1
            self.bad.append(f"copy {number}: {used >> 20} MiB: {words}")


def attack(name: str, count: int, folder: Path) -> Report:
    """Copies 0 .. `count` - 1 of a case."""
    report = Report()
    first = 0
    while first < count:
        first = _run(name, first, count, folder / str(first), report)
    return report


def _run(name: str, first: int, end: int, folder: Path, report: Report) -> int:
    """Work through copies until the process ends; the number of the next one."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.hostile.child", name, str(first), str(end), str(folder)]
    with (folder / "stderr").open("wb") as stderr:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=_ROOT, env=_environment()
        )
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=_pass_on, args=(child, lines), daemon=True)
    reader.start()
    at, left = -1, _START_S
    try:
        while line := lines.get(timeout=left):
            left = _STEP_S
            if line.startswith("begin "):
                at = int(line.split()[1])
            elif line.startswith("["):
                report.add(*json.loads(line))
        code = child.wait(timeout=_STEP_S)
        outcome = "crash"
    except (queue.Empty, subprocess.TimeoutExpired):
        code, outcome = 0, "hang"
    finally:
        child.kill()
        child.wait()
        reader.join()
        if child.stdout is not None:
            child.stdout.close()
    if code == 0 and outcome == "crash":
        return end
    said = (folder / "stderr").read_text()[-1000:]
    if at < 0:
        raise AssertionError(f"the good file of {name} must be read, but the process ended with code {code}: {said}")
    report.add(at, outcome, f"code {code}: {said}")
    return at + 1


def _pass_on(child: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    for line in child.stdout or ():
        lines.put(line)
    lines.put("")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
