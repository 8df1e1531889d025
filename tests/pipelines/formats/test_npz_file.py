from __future__ import annotations

import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydist.core.errors import DataLossError, InvalidArgumentError
from raydist.pipelines.formats import numpy_format
from raydist.pipelines.formats.numpy_format import StoredArray, stored_arrays


def describe(path: Path, max_array_bytes: int | None = None) -> list[StoredArray]:
    with path.open("rb") as file:
        return stored_arrays(str(path), file, path.stat().st_size, max_array_bytes)


def test_a_stored_member_is_compared_with_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    array = np.arange(1 << 20)
    np.savez(path, first=array[:9], second=array)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    first, second = describe(path)
    assert first.load().tolist() == list(range(9))
    with pytest.raises(DataLossError, match=r"checksum of 'second' in '.*x\.npz' must be 0x") as caught:
        second.load()
    assert caught.value.offset is not None
    assert caught.value.offset < second.offset  # type: ignore[operator]  # it is mapped
    assert (second.load(verify=False) != array).sum() == 1


def test_a_compressed_bomb_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, a=np.zeros(1 << 20))
    monkeypatch.setattr(numpy_format, "MAX_ARRAY_BYTES", 1 << 16)
    with pytest.raises(InvalidArgumentError, match=r"at most \d+ bytes, .* \(byte \d+\) has 8388736.*max_array_bytes"):
        describe(path)
    with pytest.raises(InvalidArgumentError, match=r"at most 1048576 bytes, .* has 8388736"):
        describe(path, 1 << 20)
    assert describe(path, 1 << 24)[0].load().shape == (1 << 20,)
    monkeypatch.undo()
    monkeypatch.setattr(numpy_format, "_MAX_DEFLATE_RATIO", 10)
    with pytest.raises(DataLossError, match="no compression makes 8388736 bytes so small"):
        describe(path)


def test_little_does_not_become_much(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    rows = 320 << 20
    header = {"descr": "|u1", "fortran_order": False, "shape": (rows,)}
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("a.npy", "w", force_zip64=True) as file,
    ):
        np.lib.format.write_array_header_1_0(file, header)
        for _ in range(rows >> 26):
            file.write(bytes(1 << 26))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgumentError, match="max_array_bytes"):
            describe(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_what_numpy_does_not_write(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", kind) as archive, archive.open("a.npy", "w") as file:
        np.lib.format.write_array(file, np.zeros(1 << 12))
    with pytest.raises(InvalidArgumentError, match="must be stored or deflated"):
        describe(path)


def test_many_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays: dict[str, Any] = {f"a{number}": np.arange(2) for number in range(5)}
    np.savez(tmp_path / "x.npz", **arrays)
    monkeypatch.setattr(numpy_format, "_MAX_MEMBERS", 4)
    with pytest.raises(DataLossError, match="at most 4 arrays, got 5"):
        describe(tmp_path / "x.npz")
