"""Directories of files on this machine and behind URIs, locks, and a cached epoch in them."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NoReturn

import pytest

from raydist.core.errors import DataLossError, FailedPreconditionError, InvalidArgumentError, NotFoundError
from raydist.core.failpoints import installed
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.formats.files import secrets_in, shown_uri
from raydist.pipelines.stored.cached_epoch import FileLock, Recorder, Store
from raydist.pipelines.stored.containers import Container
from raydist.pipelines.stored.directory_files import DirectoryFiles, LocalFiles, RemoteFiles, directory_files
from raydist.pipelines.stored.file_directory import locked_directory


def test_what_only_this_process_sees() -> None:
    uris = ["/tmp/x", "file:///tmp/x", "memory://x", "simplecache::memory://x", "s3://memory/x"]
    assert [directory_files(uri).only_here for uri in uris] == [False, False, True, True, False]


@pytest.fixture(params=["local", "remote"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> DirectoryFiles:
    uri = str(tmp_path / "x") if request.param == "local" else f"memory://{uuid.uuid4().hex}/x"
    found = directory_files(uri)
    found.make()
    return found


def putting(content: bytes) -> Callable[[BinaryIO], int]:
    return lambda file: file.write(content)


def content_of(directory: DirectoryFiles, name: str) -> bytes:
    opened = directory.open(name)
    try:
        return bytes(opened.file.read(1000) or b"")
    finally:
        opened.file.close()


def test_what_is_written_is_there_and_what_is_removed_is_not(directory: DirectoryFiles) -> None:
    assert directory.write("a", putting(b"123")) == 3
    directory.replace("b", b"4")
    directory.replace("b", b"56")
    inner = directory.inside("ckpt-1")
    assert (inner.names(), inner.folders()) == ([], [])  # a directory that is missing is empty
    inner.make()
    inner.write("a", putting(b"1"))
    assert (directory.names(), directory.folders()) == (["a", "b"], ["ckpt-1"])
    assert (content_of(directory, "a"), content_of(directory, "b")) == (b"123", b"56")
    assert (directory.exists("a"), directory.exists("c")) == (True, False)
    inner.remove("a")
    inner.remove("a")
    assert inner.names() == []
    with pytest.raises(NotFoundError):
        inner.open("a")
    inner.remove_directory()
    inner.remove_directory()
    assert directory.folders() == []


def test_names_are_no_paths(directory: DirectoryFiles) -> None:
    for name in ("", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "é", "a" * 201, "a\n", " a", "~root"):
        for action in (directory.open, directory.remove, directory.exists, directory.inside, directory.create):
            with pytest.raises(InvalidArgumentError, match="letters, digits"):
                action(name)


def test_a_save_that_fails_leaves_no_part_and_no_name_is_used_again(tmp_path: Path) -> None:
    directory = directory_files(str(tmp_path))

    def full(name: str) -> None:
        if name == "checkpoint.before_flush":
            raise OSError(28, "No space left on device")

    with installed(full), pytest.raises(OSError, match="No space"):
        directory.write("a", putting(b"123"))
    assert directory.names() == []
    directory.write("a", putting(b"1"))
    with pytest.raises(FileExistsError):
        directory.write("a", putting(b"2"))


def test_links_are_not_followed_and_only_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a").symlink_to(tmp_path / "secret")
    (tmp_path / "x" / "ckpt-1").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "x" / "pipe")
    (tmp_path / "x" / "folder").mkdir()
    directory = directory_files(str(tmp_path / "x"))
    descriptors = len(os.listdir("/proc/self/fd"))
    for name in ("a", "pipe", "folder"):
        with pytest.raises(DataLossError, match="plain file"):
            directory.open(name)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert (directory.names(), directory.folders()) == ([], ["folder"])
    file = LocalFiles(str(tmp_path / "secret"))
    for action in (file.make, file.names):
        with pytest.raises(FailedPreconditionError, match="it is a file"):
            action()


def test_credentials_are_never_shown() -> None:
    uri = "nosuch://key:hidden@host/x?sig=secret"
    assert secrets_in(uri) == ("key:hidden", "sig=secret")
    directory = directory_files(uri).inside("ckpt-1")
    assert isinstance(directory, RemoteFiles)
    assert directory.uri == "nosuch://key:hidden@host/x/ckpt-1?sig=secret"
    with pytest.raises(InvalidArgumentError) as raised:
        directory.make()
    for text in (str(raised.value), repr(directory), directory.shown, shown_uri(uri)):
        assert "hidden" not in text
        assert "secret" not in text


def test_what_a_server_says_does_not_show_credentials() -> None:
    def refuse(_: object) -> NoReturn:
        raise OSError("memory://key:hidden@bucket/x")

    with pytest.raises(FailedPreconditionError) as raised:
        directory_files("memory://key:hidden@bucket/x").write("a", refuse)
    assert raised.value.__cause__ is None  # it shows what the server says
    assert "hidden" not in f"{raised.value} {getattr(raised.value, '__notes__', ())}"


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


def test_a_directory_that_cannot_be_locked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked_directory(str(tmp_path), 0.0) as first, locked_directory(str(tmp_path), 0.0) as second:
        assert (first, second) == (True, False)
    with locked_directory(str(tmp_path), 0.0) as third:
        assert third
    with locked_directory(str(tmp_path / "missing"), 20.0) as locked:
        assert not locked

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)  # a file system without locks
    with locked_directory(str(tmp_path), 20.0) as locked:
        assert not locked


ARROW = Container.of("arrow", None)
BLOCK = block_of_rows([1, 2, 3])


def recorded(store: Store, origin: str) -> Recorder:
    recorder = Recorder(store, origin)
    recorder.open()
    recorder.write(BLOCK)
    return recorder


def test_where_nothing_locks_the_first_who_finishes_wins() -> None:
    store = Store(f"memory://{uuid.uuid4().hex}/x", ARROW)
    assert store.lock() is None
    first, second = (recorded(store, origin) for origin in ("first", "second"))
    second.commit()
    first.commit()
    found = store.find()
    assert found is not None
    assert found.origin == "second"


def test_one_holder_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.lock"
    path.write_text("process 1 on another machine, which died")  # a file that was left is no lock
    first, second = (FileLock(str(path)) for _ in range(2))
    assert first.acquire()
    assert not second.acquire()
    assert second.holder().startswith(f"process {os.getpid()} on ")
    first.release()
    first.release()
    assert list(tmp_path.iterdir()) == []
    assert second.holder() == "somebody who has just gone"
    assert second.acquire()
    second.release()
    flock = fcntl.flock

    def removed_before(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()  # its holder goes between our opening and locking it
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    assert first.acquire()
    assert not second.acquire()
    first.release()


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
