from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from raydist.errors import NotFoundError
from raydist.pipelines.stored.file_lock import FileLock


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first, second = (FileLock(str(tmp_path / "x.lock")) for _ in range(2))
    assert first.acquire()
    assert not second.acquire()
    assert second.holder().startswith(f"process {os.getpid()} on ")
    first.release()
    first.release()
    assert list(tmp_path.iterdir()) == []
    assert second.holder() == "somebody who has just gone"
    assert second.acquire()
    second.release()


def test_a_file_that_was_left_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "x.lock").write_text("process 1 on another machine, which died")
    lock = FileLock(str(tmp_path / "x.lock"))
    assert lock.acquire()
    assert lock.holder().startswith(f"process {os.getpid()} on ")
    lock.release()


def test_the_holder_of_a_removed_file_has_nothing(tmp_path: Path) -> None:
    first, second = (FileLock(str(tmp_path / "x.lock")) for _ in range(2))
    assert first.acquire()
    (tmp_path / "x.lock").unlink()
    assert second.acquire()
    second.release()
    first.release()


def test_a_parent_must_exist(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        FileLock(str(tmp_path / "no" / "x.lock")).acquire()


def test_a_lock_of_a_file_that_was_just_removed_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FileLock(str(tmp_path / "x.lock"))
    flock = fcntl.flock

    def removed_before(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (tmp_path / "x.lock").unlink()  # its holder goes between our opening and locking it
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    assert lock.acquire()
    assert not FileLock(str(tmp_path / "x.lock")).acquire()
    lock.release()
