from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from raydist.errors import FailedPreconditionError, NotFoundError
from raydist.pipelines.stored.store import FileLock


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


def test_what_is_no_lock_is_not_overwritten(tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "x.lock"
    precious.write_text("precious")
    lock = FileLock(str(path))
    ways = (
        lambda: path.symlink_to(precious),
        lambda: path.symlink_to(tmp_path / "not yet there"),
        lambda: path.hardlink_to(precious),
        lambda: path.write_text("my own list of versions"),
        lambda: os.mkfifo(path),
    )
    for make in ways:
        make()
        with pytest.raises(FailedPreconditionError, match=r"must be free, but '.*x.lock' is (a link|another file)"):
            lock.acquire()
        lock.release()
        assert os.path.lexists(path)
        path.unlink()
    assert precious.read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["precious"]


def test_its_holder_is_not_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "x.lock").symlink_to(tmp_path / "precious")
    assert FileLock(str(tmp_path / "x.lock")).holder() == "somebody who has just gone"
