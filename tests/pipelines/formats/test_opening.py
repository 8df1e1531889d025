from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from raydist.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from raydist.pipelines.formats.opening import create_file, open_file


def test_reads_a_local_file_and_knows_its_size(tmp_path: Path) -> None:
    path = tmp_path / "with space ü.bin"
    path.write_bytes(b"abc")
    for name in (str(path), f"file://{path}"):
        opened = open_file(name)
        assert opened.size == 3
        assert opened.file.read(10) == b"abc"
        opened.file.close()


def test_reads_and_writes_a_uri() -> None:
    with create_file("memory://folder/data.bin") as file:
        file.write(b"12345")
    opened = open_file("memory://folder/data.bin")
    assert (opened.size, opened.file.read(10)) == (5, b"12345")
    fsspec.filesystem("memory").rm("/folder", recursive=True)


# fsspec does not know "mock": pyarrow.fs opens it, and finds it empty.
@pytest.mark.parametrize("name", ["missing.bin", "file:///nowhere/x", "memory://nowhere/x", "mock:///x"])
def test_missing_file(name: str) -> None:
    with pytest.raises(NotFoundError, match="must exist, got .*Check the path"):
        open_file(name)


def test_directory_fifo_and_device_are_not_files(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    descriptors = len(os.listdir("/proc/self/fd"))
    for path, kind in ((tmp_path, "a directory"), (fifo, "a FIFO"), (Path("/dev/null"), "a character device")):
        for access in (open_file, create_file):
            with pytest.raises(InvalidArgumentError, match=f"must name a plain file, but {str(path)!r} is {kind}"):
                access(str(path))
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_permission(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def denied(*args: object) -> int:
        raise PermissionError(13, "Permission denied", "x")

    monkeypatch.setattr(os, "open", denied)  # the tests may run as root, who may read everything
    with pytest.raises(FailedPreconditionError, match="permission is denied for 'secret'.*Change its mode"):
        open_file("secret")


def test_other_errors_keep_their_type_and_name_the_file(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="levels of symbolic links") as caught:
        open_file(str(loop))
    assert caught.value.__notes__ == [f"while accessing {str(loop)!r}"]


def test_unknown_scheme() -> None:
    with pytest.raises(InvalidArgumentError, match="must be one that fsspec or pyarrow.fs knows, got 'nope://x'"):
        open_file("nope://x")
