"""The saves of one manager: which are due, and what is kept of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import raydist as rd
from raydist.checkpoints.checkpoint import contents_of
from raydist.checkpoints.managing.saves import ManagedSaves
from raydist.checkpoints.retention import Retention
from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.save_interval import SaveInterval


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[ManagedSaves]:
    run = RunDirectory(str(tmp_path), "ckpt", Retention(2))
    run.take()
    made = ManagedSaves(contents_of(rd.Checkpoint(state=rd.State(a=1))), run, SaveInterval(3), None)
    yield made
    made.writer.close()
    run.give_back()


def test_a_save_is_due_so_many_calls_after_the_last_one(saves: ManagedSaves) -> None:
    due = []
    for _ in range(7):
        saves.calls += 1
        due.append(saves.is_due(saves.step()))
        if due[-1]:
            saves.save(saves.step(), None, here=True).wait()
    assert due == [False, False, True, False, False, True, False]
    assert [path.rpartition("/")[2] for path in saves.run.newest()] == ["ckpt-3", "ckpt-6"]


def test_a_restored_count_goes_on_and_a_damaged_one_is_the_number(saves: ManagedSaves) -> None:
    saves.calls = 5
    saves.save(9, None, here=True).wait()
    (found,) = saves.run.find()
    saves.calls = 0
    saves.go_on_from(found)
    assert (saves.calls, saves.last_step) == (5, 5)
    found.details["calls"] = "many"
    saves.go_on_from(found)
    assert saves.calls == 9


@pytest.mark.parametrize("number", [-1, 10**18, 1.0, True])
def test_a_number_that_is_none_is_refused(saves: ManagedSaves, number: int) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="must be an int >= 0"):
        saves.save(number, None, here=True)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_directory_that_is_read_only_says_so(
    saves: ManagedSaves, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = os.mkdir

    def refuse(path: str, *args: int, **options: int) -> None:
        if os.path.basename(path).startswith("ckpt-"):
            raise OSError(number, os.strerror(number), path)
        made(path, *args, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises((rd.FailedPreconditionError, OSError)) as refused:
        saves.save(1, None, here=True).wait()
    assert "ckpt-1" in str(refused.value)
    monkeypatch.undo()
    saves.save(2, None, here=True).wait()
    assert [path.rpartition("/")[2] for path in saves.run.newest()] == ["ckpt-2"]
