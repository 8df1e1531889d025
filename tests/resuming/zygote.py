"""A process that has imported what programs under trial need, and forks one for each of their lives.

Each line that it reads asks for a life (a JSON list: script, arguments, environment, log). It writes the process's id,
and its exit code when it has ended; one life at a time. Its arguments are modules that it imports beforehand.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

import raydist
from tests.resuming.journal import Journal
from tests.resuming.power_loss import FLUSHES_VARIABLE, noted_flushes

_PARENT_DEATH_SIGNAL = 1  # prctl(2): PR_SET_PDEATHSIG
_IMPORTED = ("Checkpoint", "Dataset", "Model", "OneDeviceStrategy")  # with what they import


def main() -> None:
    """Fork until the asker goes."""
    _end_with_parent()
    _import_all(sys.argv[1:])
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            _live(*json.loads(line))
        _say(pid)
        _say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _import_all(modules: Sequence[str]) -> None:
    for name in _IMPORTED:
        getattr(raydist, name)
    for name in modules:
        importlib.import_module(name)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # which imports torch's compiler: a second
    gc.freeze()  # forks share the memory


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _live(script: str, arguments: list[str], environment: dict[str, str], log: str) -> NoReturn:
    """Be the program, to the end of the process."""
    _end_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path[:0] = [str(Path(script).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with contextlib.ExitStack() as stack:
        if FLUSHES_VARIABLE in os.environ:
            kept = Journal.of_environment().folder
            stack.enter_context(noted_flushes(kept, Path(os.environ[FLUSHES_VARIABLE])))
        code = _run(script)
    # As an interpreter ends, but for taking apart what was imported, which takes a second.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _run(script: str) -> int:
    """The exit code."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
