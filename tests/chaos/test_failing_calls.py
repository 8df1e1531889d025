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
import torch

import raydist as rd
from raydist.core.failpoints import installed
from tests.chaos.extent import how_many

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


class Training:
    """A tensor that each step changes, saved by a manager."""

    def __init__(self, folder: Path) -> None:
        self.module, self.progress = torch.nn.Linear(3, 3), rd.State(step=0)
        checkpoint = rd.Checkpoint(module=self.module, progress=self.progress)
        self.manager = rd.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
        self.safe = 0

    def step(self) -> bool:
        """Whether it was saved."""
        with torch.no_grad():
            self.module.weight.fill_(self.progress.step + 1)
        self.progress.step += 1
        try:
            handle = self.manager.save()
            assert handle is not None
            handle.wait()
        except OSError:
            return False
        self.safe = self.progress.step
        return True

    def resumed(self) -> int:
        """At which step another process would go on."""
        self.manager.restore_or_initialize()
        assert self.module.weight.unique().tolist() == [self.progress.step]
        return int(self.progress.step)


def disturbed(folder: Path, call: str, fault: Fault) -> None:
    training = Training(folder)
    for _ in range(2):
        assert training.step()
    with failing(call, fault):
        for _ in range(2):  # the second one removes an old one, and may find what the first has left
            training.step()
    safe = training.safe
    for _ in range(2):
        assert training.step()
    training.manager.close()
    assert training.safe == 6 > safe >= 2
    again = Training(folder)
    assert again.resumed() == 6
    again.manager.close()
    assert sorted(os.listdir(folder)) == ["ckpt-5", "ckpt-6"]


def faults(folder: Path, call: str, count: int) -> Iterator[tuple[Path, Fault]]:
    """One that begins at each passage; `make test` tries some of these."""
    whole = Fault(FOR_GOOD, 0)
    disturbed(folder / "whole", call, whole)
    assert whole.passed > 1
    for first in range(1, 1 + whole.passed, how_many(some=5, many=1)):
        yield folder / str(first), Fault(first, count)


@pytest.mark.filterwarnings("ignore:.*could not be saved:RuntimeWarning")
@pytest.mark.parametrize("call", [*CALLS, POINTS])
@pytest.mark.parametrize("count", [1, FOR_GOOD])
def test_training_goes_on_and_what_was_safe_is(tmp_path: Path, call: str, count: int) -> None:
    for folder, fault in faults(tmp_path, call, count):
        disturbed(folder, call, fault)


@pytest.mark.filterwarnings("ignore:.*could not be saved:RuntimeWarning")
@pytest.mark.parametrize("call", [*CALLS, POINTS])
def test_the_process_ends_while_nothing_works(tmp_path: Path, call: str) -> None:
    for folder, fault in faults(tmp_path, call, FOR_GOOD):
        training = Training(folder)
        for _ in range(2):
            assert training.step()
        with failing(call, fault):
            for _ in range(2):
                training.step()
            with contextlib.suppress(OSError):
                training.manager.close()
        again = Training(folder)
        assert again.resumed() in (training.safe, training.safe + 1)  # or what is there, but was not told
        again.manager.close()
