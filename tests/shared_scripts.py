"""Scripts one after the other in one process, on one Ray, on shared strategies: else each starts for 8 s of a core."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import final

import pytest

from tests.ray_head import ray_home
from tests.resuming.lives import is_readable
from tests.shared_files import left_behind, shared_files
from tests.watched_program import TOO_LONG, WatchedProgram

EXAMPLES = Path(__file__).parent.parent / "examples"
END_S = 30.0
"""Seconds in which the process must end when there are no more scripts."""

# A strategy is closed when the process ends, and given to the next script that asks for one of the same settings.
_PROGRAM = """
import inspect, json, os, runpy, sys, traceback, warnings
import raydist as rd

closers = []

def sharing(kind):
    made, close = {}, kind.close
    def make(*arguments, **options):
        wanted = inspect.signature(kind).bind(*arguments, **options)
        wanted.apply_defaults()
        wanted.arguments.pop("failure_options", None)  # nothing is lost here
        if repr(wanted) not in made:
            strategy = made[repr(wanted)] = kind(*arguments, **options)
            closers.append(lambda: close(strategy))
        made[repr(wanted)]._set_gradient_reduce_op(rd.RunOptions(gradient_reduce_op="MEAN"))
        return made[repr(wanted)]
    kind.close, kind.__exit__ = (lambda self: None), (lambda self, *error: None)
    return make

for name in ("Mirrored", "CentralStorage", "MultiWorkerMirrored", "ParameterServer"):
    setattr(rd, f"{name}Strategy", sharing(getattr(rd, f"{name}Strategy")))
done = os.fdopen(int(sys.argv[1]), "w", buffering=1)
path = list(sys.path)
for line in os.fdopen(os.dup(0)):  # `exit()` closes sys.stdin
    sys.argv = json.loads(line)
    sys.path[:] = [os.path.dirname(sys.argv[0]), *path]
    status = 0
    with warnings.catch_warnings():
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    print(status, file=done)
for close in closers:
    close()
"""


@final
class Scripts:
    """Runs scripts in a process that it starts for the first one; after one that hangs, in a new one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._program: WatchedProgram | None = None
        self._done = -1

    def run(self, script: Path | str, *arguments: str, status: int | str = 0, limit_s: float = 280) -> str:
        """Return the output of a script, which must end with `status` (or these words); a name: of an example."""
        program = self._program or self._start()
        assert program.process.stdin is not None
        begin = program.length()
        program.process.stdin.write(json.dumps([str(EXAMPLES / script), *arguments]).encode() + b"\n")
        program.process.stdin.flush()
        try:
            if not is_readable(self._done, limit_s):
                raise TimeoutError
        except TOO_LONG:
            error = program.hangs()
            self._close()
            raise error from None
        found = os.read(self._done, 100).decode().strip()  # nothing where the process has ended
        if found != str(status):
            error = AssertionError(f"{script} {' '.join(arguments)} ended with {found!r}:\n{program.printed(begin)}")
            self._close()
            raise error
        return program.printed(begin, err=status != 0)

    def end(self) -> None:
        """Let the process end, as a program does after its last line."""
        program = self._program
        if program is not None:
            assert program.process.stdin is not None
            program.process.stdin.close()
            try:
                assert program.process.wait(END_S) == 0, program.printed()
            except TOO_LONG:
                raise program.hangs() from None
            finally:
                self._close()

    def _start(self) -> WatchedProgram:
        self._done, written = os.pipe()
        with contextlib.closing(os.fdopen(written)):
            command = [sys.executable, "-c", _PROGRAM, str(written)]
            self._program = WatchedProgram.start(
                command, folder=EXAMPLES, environment=self._environment, pass_fds=[written]
            )
        return self._program

    def _close(self) -> None:
        if self._program is not None:
            self._program.close()
            os.close(self._done)
            self._program = None


@pytest.fixture(scope="session")
def scripts() -> Iterator[Scripts]:
    """Runs scripts in one process, which has a Ray of its own; nothing of that may outlive the process."""
    files = shared_files()
    with ray_home() as home:
        # Workers of the Ray that the first script starts find modules beside examples, too.
        paths = os.pathsep.join(filter(None, [str(EXAMPLES), home.environment.get("PYTHONPATH", "")]))
        runner = Scripts({**home.environment, "PYTHONPATH": paths})
        yield runner
        runner.end()
        assert home.processes_left(within_s=10) == {}
    assert not left_behind(files)
