"""Each call to the system that a save makes fails, once or for a while: what was safe stays safe, training goes on."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from raydist.core.failpoints import installed
from tests.chaos.extent import how_many
from tests.chaos.training import Training, resumed

CALLS = ("fsync", "replace", "mkdir", "unlink", "rmdir", "scandir", "open")  # of `os`
POINTS = "failpoint"
"""As another one: where bytes are written by C."""

FOR_GOOD = 10**9


class Fault:
    """Calls fail from one of them on, for as many as it is told. Counts all."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count
        self.passed = 0

    def note(self) -> None:
        self.passed += 1
        if 0 <= self.passed - self._first < self._count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextlib.contextmanager
def failing(call: str, fault: Fault) -> Iterator[None]:
    if call == POINTS:
        with installed(lambda name: fault.note()):
            yield
        return
    right: Callable[..., Any] = getattr(os, call)

    def wrong(*args: Any, **settings: Any) -> Any:
        fault.note()
        return right(*args, **settings)

    with mock.patch.object(os, call, wrong):
        yield


def disturbed(folder: Path, call: str, fault: Fault) -> None:
    training = Training(folder)
    assert training.saves()
    assert training.saves()
    with failing(call, fault):
        for _ in range(2):  # the second one removes an old one, and may find what the first has left
            training.saves()
    safe = training.safe
    assert training.saves()
    assert training.saves()
    training.manager.close()
    assert training.safe == 6 > safe >= 2
    assert resumed(folder) == 6
    assert sorted(os.listdir(folder)) == ["ckpt-5", "ckpt-6"]


def ended(folder: Path, call: str, fault: Fault) -> None:
    """The process ends while nothing works."""
    training = Training(folder)
    assert training.saves()
    assert training.saves()
    with failing(call, fault):
        for _ in range(2):
            training.saves()
        with contextlib.suppress(OSError):
            training.manager.close()
    assert resumed(folder) in (training.safe, training.safe + 1)  # or what is there, but was not told


@pytest.mark.filterwarnings("ignore:.*could not be saved:RuntimeWarning")
@pytest.mark.parametrize("call", [*CALLS, POINTS])
def test_training_goes_on_and_what_was_safe_is(tmp_path: Path, call: str) -> None:
    """A fault begins at each passage; `make test` tries some of these."""
    whole = Fault(FOR_GOOD, 0)
    disturbed(tmp_path / "whole", call, whole)
    assert whole.passed > 1
    for first in range(1, 1 + whole.passed, how_many(some=5, many=1)):
        for count in (1, FOR_GOOD):
            disturbed(tmp_path / f"{first}-{count}", call, Fault(first, count))
        ended(tmp_path / f"{first}-ended", call, Fault(first, FOR_GOOD))
