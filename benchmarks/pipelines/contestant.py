"""A contender's process, seen from outside."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks import processes

ROOT = Path(__file__).parent.parent.parent
END_S = 20.0
"""How long servers and clusters may take to end."""
_SETTLE_S = 0.5  # the timers of a Ray cluster are all due at once


class PassError(Exception):
    """A contender cannot do the workload, or took too long."""


@dataclass(frozen=True)
class Job:
    """A workload as a worker process is told about it."""

    workload: str
    folder: str
    rows: int
    num_workers: int
    num_calls: int | None
    warm_up: bool


class Contestant:
    """The worker process of one contender. It is a process group of its own: what it started goes when it goes.

    Args:
        command: What starts it.
        log: File for its standard error.
        limit_s: Seconds that a preparation (with its untimed pass) and each timed pass may take.
    """

    def __init__(self, command: Sequence[str], log: Path, limit_s: float) -> None:
        self._command = command
        self._log = log
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pauses = False

    def prepare(self, job: Job) -> str:
        """Get ready for a workload; starts the process if there is none. Gives the version of the library.

        Raises:
            PassError: It cannot do this workload.
        """
        return str(self.request(asdict(job))["version"])

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to any request; starts the process if there is none.

        Raises:
            PassError: The answer tells a problem, or the process ended or took too long.
        """
        if self._process is None:
            self._start()
        self.resume()
        return self._ask(request)

    def pause(self) -> None:
        """Take no CPU time until the next request: its process and all that it started are stopped."""
        if self._process is not None and not self._pauses:
            self._pauses = True
            processes.pause(self._process.pid)

    def resume(self) -> None:
        """Go on where it was paused. Blocking then: until what has become due meanwhile is done."""
        if self._process is not None and self._pauses:
            self._pauses = False
            processes.resume(self._process.pid)
            time.sleep(_SETTLE_S)

    def run(self) -> tuple[float, float]:
        """One pass: what it gave, and its seconds.

        Raises:
            PassError: It failed, or took too long.
        """
        answer = self._ask({})
        return float(answer["result"]), float(answer["seconds"])

    def close(self, patience_s: float = END_S) -> None:
        """End the process, by force if it does not end by itself in time, and all that it started."""
        self.resume()
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):  # it is gone already
            _pipe(process.stdin).close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _pipe(process.stdout).close()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - an interpreter with a module of this package
                self._command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            raise PassError("its process has ended")
        try:
            answer = self._exchange(self._process, request)
        except (OSError, PassError) as error:
            self.close(patience_s=0.0)
            raise PassError(f"{error} (see {self._log})") from error
        if "problem" in answer:
            raise PassError(str(answer["problem"]))
        return answer

    def _exchange(self, process: subprocess.Popen[bytes], request: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = _pipe(process.stdin), _pipe(process.stdout)
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(self._limit_s):
                raise PassError(f"took longer than {self._limit_s:.0f} s")
        line = stdout.readline()
        if not line:
            raise PassError("its process has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise AssertionError("Standard input and output of a contestant are pipes.")
    return stream
