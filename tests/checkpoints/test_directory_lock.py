"""One process may write into a directory."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from raydist.checkpoints.directory_lock import LOCK_FILE, DirectoryLock, Holder, judge_holder, read_holder, this_process
from raydist.core.errors import FailedPreconditionError
from raydist.pipelines.stored.directory_files import LocalFiles, directory_files

ELSEWHERE = Holder("other", "another-host", 7, "2026-11-22 10:00:00 +0000", machine="another", started="1")


def test_a_second_writer_is_refused_and_the_holder_named(tmp_path: Path) -> None:
    first, second = DirectoryLock(LocalFiles(str(tmp_path))), DirectoryLock(LocalFiles(str(tmp_path)))
    first.acquire()
    first.acquire()
    first.require()
    with pytest.raises(FailedPreconditionError, match=rf"belongs to process {os.getpid()} on .*, since \d{{4}}-"):
        second.acquire()
    first.release()
    first.release()
    second.acquire()
    second.release()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_read_only_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC):

        def refuse(path: str, *_: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number), path)

        monkeypatch.setattr(os, "mkdir", refuse)
        lock = DirectoryLock(LocalFiles(str(tmp_path / "new")))
        expected = OSError if number == errno.ENOSPC else FailedPreconditionError
        with pytest.raises(expected, match="permission is denied|Read-only file system|No space left"):
            lock.acquire()
        assert not lock.is_acquired


def test_a_lock_file_that_could_not_be_removed_does_not_block_this_process(tmp_path: Path) -> None:
    first, second = DirectoryLock(LocalFiles(str(tmp_path))), DirectoryLock(LocalFiles(str(tmp_path)))
    first.acquire()
    with mock.patch.object(LocalFiles, "remove", side_effect=OSError("the store is down")):
        first.release()
    assert (tmp_path / LOCK_FILE).exists()
    second.acquire()
    with pytest.raises(FailedPreconditionError, match="belongs to process"):
        first.acquire()
    second.release()


def test_a_dropped_lease_is_released(tmp_path: Path) -> None:
    lock = DirectoryLock(LocalFiles(str(tmp_path)))
    lock.acquire()
    del lock
    gc.collect()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_lease_of_another_machine_is_held_while_its_counter_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = directory_files(f"memory://{tmp_path}")
    files.make()
    files.replace(LOCK_FILE, ELSEWHERE.to_bytes())
    lock = DirectoryLock(files, beat_s=0.02, lapse_s=0.1)
    lock.acquire()
    lock.release()
    looks = iter([ELSEWHERE, replace(ELSEWHERE, beat=1)])
    monkeypatch.setattr("raydist.checkpoints.directory_lock.read_holder", lambda files: next(looks))
    with pytest.raises(FailedPreconditionError, match="process 7 on another-host"):
        DirectoryLock(LocalFiles(str(tmp_path)), beat_s=0.01, lapse_s=10).acquire()


def test_a_process_that_lost_its_lease_stops_writing(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    lock = DirectoryLock(files)
    lock.acquire()
    files.replace(LOCK_FILE, ELSEWHERE.to_bytes())
    with pytest.raises(FailedPreconditionError, match="another-host"):
        lock.require()
    lock.release()
    assert read_holder(files) == ELSEWHERE


def test_the_counter_grows_while_the_lease_is_held(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    lock = DirectoryLock(files, beat_s=0.01)
    lock.acquire()
    first = read_holder(files)
    while (now := read_holder(files)) == first:
        pass
    lock.release()
    assert first is not None
    assert now is not None
    assert now.beat > first.beat


def test_a_reused_process_number_and_a_file_that_is_no_lease_are_free() -> None:
    me = this_process()
    assert judge_holder(replace(me, token="x"), me) == "held"
    assert judge_holder(replace(me, token="x", started="1"), me) == "free"
    assert judge_holder(replace(me, token="x", pid=1 << 30), me) == "free", "there is no such process"
    assert judge_holder(replace(me, token="x", machine="another"), me) == "unknown"
    for content in (b"", b"{", b"[]", b'{"token": 1}', b"[" * 100_000):
        assert Holder.of_bytes(content) is None, content[:20]


def test_one_of_two_simultaneous_processes_gets_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = DirectoryLock(LocalFiles(str(tmp_path))), DirectoryLock(LocalFiles(str(tmp_path)))
    original = DirectoryLock._await_free

    def await_free(self: DirectoryLock, me: Holder) -> Holder | None:
        free = original(self, me)
        if self is first:
            second.acquire()
        return free

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryLock, "_await_free", await_free)
        with pytest.raises(FailedPreconditionError, match="belongs to process"):
            first.acquire()
    second.require()
    assert (first.is_acquired, second.is_acquired) == (False, True)
    second.release()
    first.acquire()
    first.release()


def test_a_lease_is_removed_while_nobody_else_can_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, calls, original = DirectoryLock(LocalFiles(str(tmp_path))), list[str](), LocalFiles.remove
    lock.acquire()

    @contextlib.contextmanager
    def alone(self: LocalFiles, within_s: float) -> Iterator[None]:
        calls.append("alone")
        yield
        calls.append("no longer")

    def remove(self: LocalFiles, name: str) -> None:
        calls.append("remove")
        original(self, name)

    monkeypatch.setattr(LocalFiles, "alone", alone)
    monkeypatch.setattr(LocalFiles, "remove", remove)
    lock.release()
    assert calls == ["alone", "remove", "no longer"]
    assert not (tmp_path / LOCK_FILE).exists()
