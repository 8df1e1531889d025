"""Failpoints: nothing by default, a handler in this process, SIGKILL in one whose environment says so."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from raydist.core import failpoints
from raydist.core.errors import InvalidArgumentError
from raydist.core.failpoints import FAILPOINT_VARIABLE, KNOWN_FAILPOINTS, failpoint, installed
from tests.import_graph import modules

NAME = KNOWN_FAILPOINTS[0]


def in_child(program: str, wanted: str) -> int:
    """The exit status of a program that has three failpoints behind each other."""
    source = f"import runpy\nfailpoint = runpy.run_path({failpoints.__file__!r})['failpoint']\n{program}"
    environment = {**os.environ, FAILPOINT_VARIABLE: wanted}
    return subprocess.run([sys.executable, "-c", source], env=environment, check=False).returncode


def test_nothing_happens_without_a_handler() -> None:
    failpoint(NAME)


def test_handlers_are_told_while_they_are_installed() -> None:
    first: list[str] = []
    second: list[str] = []
    with installed(first.append):
        failpoint(NAME)
        with installed(second.append):
            failpoint(NAME)
    failpoint(NAME)
    assert (first, second) == ([NAME, NAME], [NAME])


def test_a_handler_may_raise() -> None:
    def full(name: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"), installed(full):
        failpoint(NAME)
    failpoint(NAME)


def test_an_unknown_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match="'checkpoint.never'"):
        failpoint("checkpoint.never")
    monkeypatch.setenv(FAILPOINT_VARIABLE, "checkpoint.nevermore")
    with pytest.raises(InvalidArgumentError, match="'checkpoint.nevermore'"):
        failpoint(NAME)


def test_a_child_kills_itself_at_the_count() -> None:
    program = f"for number in range(3):\n    failpoint({NAME!r})\nraise SystemExit(number)"
    assert in_child(program, NAME) == -signal.SIGKILL
    assert in_child(program, f"{NAME}:3") == -signal.SIGKILL
    assert in_child(program, f"{NAME}:4") == 2
    assert in_child(program, KNOWN_FAILPOINTS[1]) == 2


def test_those_that_the_package_passes_are_known() -> None:
    passed = {
        name for path in modules().values() for name in re.findall(r'\bfailpoint\("([a-z_.]+)"\)', path.read_text())
    }
    assert passed <= set(KNOWN_FAILPOINTS)
