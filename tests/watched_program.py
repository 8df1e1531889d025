"""Programs that a test runs to their end; of one that takes too long, where each of its threads was."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, final

import pytest

_STACKS_S = 10.0
"""Seconds in which an aborted process must write its stacks."""

TOO_LONG = (subprocess.TimeoutExpired, TimeoutError, pytest.fail.Exception)
"""Exceptions of a wait at its own limit, and at the limit of the test (from pytest-timeout)."""


@final
class WatchedProgram:
    """A program that runs, and what it has printed so far."""

    def __init__(
        self, process: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes], variables: Mapping[str, str]
    ) -> None:
        self.process = process
        self._out, self._err = out, err
        self._variables = variables

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> WatchedProgram:
        """Start it; with files to be passed on, it reads what is written to its standard input."""
        variables = {**(os.environ if environment is None else environment), "PYTHONFAULTHANDLER": "1"}
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes them
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.PIPE if pass_fds else subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=pass_fds,
        )
        return cls(process, out, err, variables)

    def printed(self, start: int = 0, *, err: bool = True) -> str:
        """Return the output so far, from a place in the standard output on."""
        return _text(self._out)[start:].decode() + (_text(self._err).decode() if err else "")

    def length(self) -> int:
        """Return the length of the standard output so far."""
        return os.fstat(self._out.fileno()).st_size

    def hangs(self) -> AssertionError:
        """The error for a program that has not ended in time, which it ends."""
        of_actors = _abort(self.process, self._variables)
        return AssertionError(f"{self.process.args!r} had not ended in time:\n{of_actors}\n{self.printed()}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self._out, self._err, self.process.stdin):
            if file is not None:
                file.close()


def _text(file: IO[bytes]) -> bytes:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


def _abort(process: subprocess.Popen[bytes], variables: Mapping[str, str]) -> str:
    """End a program and its actors, and say what the actors have written; what the program has is in its own output."""
    logs = Path(variables.get("RAY_TMPDIR", "/nowhere"), "ray", "session_latest", "logs")
    actors = _actors_of(process.pid, str(logs.parent.parent))
    for pid in [*actors, process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STACKS_S)
    if actors:
        time.sleep(1.0)  # they write theirs meanwhile
    written = {file.name: file.read_text(errors="replace") for file in sorted(logs.glob("worker-*.err"))}
    return "\n".join(f"--- {name}\n{text}" for name, text in written.items() if text)


def _actors_of(root: int, ray_folder: str) -> list[int]:
    """Processes of Ray's workers that a program has started, or that a node has which keeps its files in a folder."""
    children: dict[int, list[int]] = defaultdict(list)
    lines: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(entry.name))
            lines[int(entry.name)] = (entry / "cmdline").read_text(errors="replace")
    pending = [root, *(pid for pid, line in lines.items() if ray_folder in line)]
    found: set[int] = set()
    while pending:
        pid = pending.pop()
        found.add(pid)
        pending.extend(child for child in children[pid] if child not in found)
    return [pid for pid in sorted(found) if lines.get(pid, "").startswith("ray::")]
