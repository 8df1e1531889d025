from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

import raydist as rd
from raydist.pipelines.formats.whole_file import read_file


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
