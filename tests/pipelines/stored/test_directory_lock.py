"""One at a time looks into a directory and writes there."""

from __future__ import annotations

import errno
import fcntl
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from raydist.pipelines.stored.local_files import locked_directory


def test_one_is_inside_and_nothing_stays_there(tmp_path: Path) -> None:
    inside, counts = 0, []

    def count() -> None:
        nonlocal inside
        for _ in range(50):
            with locked_directory(str(tmp_path), 20.0) as locked:
                assert locked
                inside += 1
                counts.append(inside)
                inside -= 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert counts == [1] * 200
    assert not list(tmp_path.iterdir())


def test_who_stays_inside_holds_nobody_up_for_ever(tmp_path: Path) -> None:
    with locked_directory(str(tmp_path), 0.0) as first, locked_directory(str(tmp_path), 0.0) as second:
        assert (first, second) == (True, False)
    with locked_directory(str(tmp_path), 0.0) as third:
        assert third


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked_directory(str(tmp_path), 20.0) as locked:
        assert not locked


def test_a_directory_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    with locked_directory(str(tmp_path / "missing"), 20.0) as locked:
        assert not locked
