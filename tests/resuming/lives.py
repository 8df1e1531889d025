"""Processes of programs that are going to be killed: forked from one that has imported everything, or fresh ones."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

__all__ = ["Life", "Lines", "Lives", "TrialProgram", "forked_lives", "fresh_life", "is_readable"]


class _HasFileNumber(Protocol):
    def fileno(self) -> int: ...


def is_readable(file: int | _HasFileNumber, wait_s: float) -> bool:
    """Return True if there is something to read, or the end, within so many seconds."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(0.0, wait_s) * 1000))


@final
class Lines:
    """Lines that another process writes, read without a thread, which would outlive the test."""

    def __init__(self, file: _HasFileNumber) -> None:
        self._file = file.fileno()
        self._read = b""

    def next(self, wait_s: float) -> str:
        """Return the next line, "" at the end. Raise TimeoutError if nothing comes for so long."""
        while b"\n" not in self._read:
            if not is_readable(self._file, wait_s):
                raise TimeoutError(f"nothing for {wait_s} s")
            more = os.read(self._file, 1 << 16)
            if not more:
                return ""
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()


_ROOT = Path(__file__).parents[2]
_START_S = 120.0
_OF_FORKS = {
    # Threads of libraries do not outlive a fork.
    **{"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    # Otherwise the last bit of a product depends on where MKL's operands lie in memory, so that two lives differ.
    "MKL_CBWR": "COMPATIBLE",
}


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that imports `tests`, too."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, **more}


@final
@dataclass(frozen=True)
class TrialProgram:
    """A script that resumes from what it finds in the folder of its `Journal`; one life may take `limit_s`."""

    script: Path
    arguments: tuple[str, ...] = ()
    limit_s: float = 60.0


@final
class Life:
    """One process of a program; `wait` returns its exit code (-9: killed), or None if it still lives after so long."""

    def __init__(self, pid: int, wait: Callable[[float], int | None]) -> None:
        self.pid = pid
        self._wait = wait
        self._code: int | None = None

    def exit_code(self, wait_s: float) -> int | None:
        if self._code is None:
            self._code = self._wait(wait_s)
        return self._code

    def kill(self) -> None:
        """SIGKILL, unless it has just ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


Lives = Callable[[TrialProgram, Mapping[str, str], Path], Life]
"""Starts a process of a program, with variables; it prints to the end of a file. One lives at a time."""


def fresh_life(program: TrialProgram, environment: Mapping[str, str], log: Path) -> Life:
    """Start a new interpreter: for programs that start Ray."""
    command = [sys.executable, str(program.script), *program.arguments]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=_environment(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )

    def wait(seconds: float) -> int | None:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    return Life(process.pid, wait)


@contextlib.contextmanager
def forked_lives(modules: Sequence[str] = ()) -> Iterator[Lives]:
    """Lives that are forks of a process that has imported torch, raydist and `modules`: they begin within milliseconds.

    For programs without Ray.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "tests.resuming.zygote", *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(_OF_FORKS),
    ) as zygote:
        asked, said = zygote.stdin, zygote.stdout
        assert asked is not None
        assert said is not None
        lines = Lines(said)

        def answer(wait_s: float) -> int | None:
            """Return the next number that the zygote writes; None if it writes nothing for so long."""
            try:
                line = lines.next(wait_s)
            except TimeoutError:
                return None
            assert line, f"the process that forks ended with code {zygote.wait()}"
            return int(line)

        def begin(program: TrialProgram, environment: Mapping[str, str], log: Path) -> Life:
            wanted = (str(program.script), program.arguments, dict(environment), str(log))
            assert zygote.stdin is not None
            asked.write(f"{json.dumps(wanted)}\n".encode())
            asked.flush()
            pid = answer(_START_S)
            assert pid is not None, f"a fork must begin within {_START_S} s"
            return Life(pid, answer)

        try:
            yield begin
        finally:
            zygote.kill()
