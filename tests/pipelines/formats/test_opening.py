from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

import raydist as rd
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from raydist.pipelines.formats.opening import create_file, local_size, open_file, read_file, require_same_size


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


@pytest.mark.parametrize("size", [0, 1, 3 << 20])
def test_everything_is_read(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    assert read_file(tmp_path / "file") == content
    assert read_file(f"file://{tmp_path}/file") == content


def test_uris_are_read() -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/whole_file/a", b"abc")
    try:
        assert read_file("memory://whole_file/a") == b"abc"
    finally:
        system.rm("/whole_file", recursive=True)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(rd.NotFoundError, match="none.jpg"):
        read_file(tmp_path / "none.jpg")
    with pytest.raises(rd.InvalidArgumentError, match="is a directory"):
        read_file(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(rd.InvalidArgumentError, match="is a FIFO"):
        read_file(tmp_path / "fifo")
    with pytest.raises(rd.SpecError, match="file name must be"):
        read_file(3)


def test_a_size_is_compared_where_it_is_known(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("12345")
    assert [local_size(path) for path in (str(tmp_path / "a"), str(tmp_path / "b"), "memory://x/a")] == [5, 0, 0]
    for path, size in (("a", 5), ("a", 0), ("b", 7)):
        require_same_size(str(tmp_path / path), size)
    require_same_size("memory://x/a", 7)
    with pytest.raises(FailedPreconditionError, match="had 6 bytes then and has 5 now. Restore the file"):
        require_same_size(str(tmp_path / "a"), 6)


def as_text(path: str) -> rd.Dataset:
    return rd.TextLineDataset([path])


def as_rows(path: str) -> rd.Dataset:
    return rd.Dataset.from_csv([path])


@pytest.mark.parametrize("read", [as_text, as_rows])
def test_an_epoch_goes_on_in_the_same_file_only(read: Callable[[str], rd.Dataset], tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("".join(f"{number}\n" for number in range(100, 120)))
    view = rd.OneDeviceStrategy("cpu").distribute_dataset(read(str(path)).batch(4))
    iterator = iter(view)
    next(iterator)
    state: Any = view.state_dict()
    rest = [str(batch) for batch in iterator]

    def resumed() -> list[str]:
        again = rd.OneDeviceStrategy("cpu").distribute_dataset(read(str(path)).batch(4))
        again.load_state_dict(state)
        return [str(batch) for batch in again]

    assert resumed() == rest
    path.write_text("".join(f"{number}\n" for number in range(1000, 1020)))
    with pytest.raises(FailedPreconditionError, match="data.csv' had 80 bytes then and has 100 now"):
        resumed()
