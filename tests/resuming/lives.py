"""Processes of programs that are going to be killed: forked from one that has imported everything, or fresh ones."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, final

from raydist.core.errors import DeadlineExceededError, UnavailableError

__all__ = ["ForkedLives", "FreshLives", "Life", "Lives", "TrialProgram", "is_readable"]


class _HasFileNumber(Protocol):
    def fileno(self) -> int: ...


def is_readable(file: int | _HasFileNumber, wait_s: float) -> bool:
    """Return True if there is something to read, or the end, within so many seconds.

    >>> import os
    >>> reading, writing = os.pipe()
    >>> is_readable(reading, 0.0)
    False
    >>> os.close(writing)
    >>> is_readable(reading, 1.0)
    True
    >>> os.close(reading)
    """
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(0.0, wait_s) * 1000))


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
    """A script that resumes from what it finds in the folder of its :class:`Journal`.

    Attributes:
        script: File.
        arguments: Of its command line.
        limit_s: How long one life may take.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    limit_s: float = 60.0


class Life(ABC):
    """One process of a program.

    Attributes:
        pid: Its id.
    """

    pid: int

    @abstractmethod
    def exit_code(self, wait_s: float) -> int | None:
        """Return the exit code (-9: killed), or None if the process still lives after so long."""

    def kill(self) -> None:
        """SIGKILL, unless it has just ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Lives(ABC):
    """Starts processes of programs; one lives at a time."""

    @abstractmethod
    def begin(self, program: TrialProgram, environment: Mapping[str, str], log: Path) -> Life:
        """Start one; what it prints goes to the end of `log`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End what was started. May be called twice."""


@final
class FreshLives(Lives):
    """Each life is a new interpreter: for programs that start Ray."""

    def __init__(self) -> None:
        self._last: subprocess.Popen[bytes] | None = None

    def begin(self, program: TrialProgram, environment: Mapping[str, str], log: Path) -> Life:
        command = [sys.executable, str(program.script), *program.arguments]
        with log.open("ab") as output:
            self._last = subprocess.Popen(
                command, env=_environment(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        return _Fresh(self._last)

    def close(self) -> None:
        last, self._last = self._last, None
        if last is not None and last.poll() is None:
            last.kill()
            last.wait()


@final
class _Fresh(Life):
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process

    def exit_code(self, wait_s: float) -> int | None:
        try:
            return self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None


@final
class ForkedLives(Lives):
    """Each life is a fork of a process that has imported torch and raydist: it begins within some milliseconds.

    For programs without Ray.

    Args:
        modules: What else is imported once for all.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = tuple(modules)
        self._zygote: _Zygote | None = None

    def begin(self, program: TrialProgram, environment: Mapping[str, str], log: Path) -> Life:
        answers = self._started()
        wanted = {
            "script": str(program.script),
            "arguments": program.arguments,
            "environment": dict(environment),
            "log": str(log),
        }
        answers.ask(json.dumps(wanted))
        return _Forked(answers)

    def _started(self) -> _Zygote:
        if self._zygote is None:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.resuming.zygote", *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(_OF_FORKS),
            )
            self._zygote = _Zygote(process)
        return self._zygote

    def close(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()


@final
class _Zygote:
    """The process that forks."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._said = b""

    def ask(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def answer(self, wait_s: float) -> int | None:
        """Return the next number that it writes; None if it writes nothing for so long."""
        output = self._process.stdout
        assert output is not None
        while b"\n" not in self._said:
            if not is_readable(output, wait_s):
                return None
            more = os.read(output.fileno(), 1024)
            if not more:
                raise UnavailableError(
                    f"The process that forks must live, but it ended with code {self._process.wait()}. See what it "
                    "printed."
                )
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return int(line)

    def close(self) -> None:
        """End it, and its forks with it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@final
class _Forked(Life):
    def __init__(self, zygote: _Zygote) -> None:
        self._zygote = zygote
        self._code: int | None = None
        pid = zygote.answer(_START_S)
        if pid is None:
            raise DeadlineExceededError(f"A fork must begin within {_START_S} s, but none did. See what else runs.")
        self.pid = pid

    def exit_code(self, wait_s: float) -> int | None:
        if self._code is None:
            self._code = self._zygote.answer(wait_s)
        return self._code
