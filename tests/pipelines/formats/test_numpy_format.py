from __future__ import annotations

import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydist.core.errors import DataLossError, InvalidArgumentError, SpecError
from raydist.pipelines.formats import numpy_format
from raydist.pipelines.formats.numpy_format import StoredArray, stored_array, stored_arrays


def described(path: Path, max_array_bytes: int | None = None) -> list[StoredArray]:
    with path.open("rb") as file:
        if path.suffix == ".npz":
            return stored_arrays(str(path), file, path.stat().st_size, max_array_bytes)
        return [stored_array(str(path), file, path.stat().st_size)]


def write_header(path: Path, descr: str, shape: str) -> None:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(80))


ARRAYS: list[np.ndarray[Any, Any]] = [
    np.arange(6).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(3, dtype=">f4"),
    np.array([b"ab", b"c"]),
    np.array(["ä", "bcd"]),
    np.zeros((0, 3), np.uint8),
    np.array(7),
]


def test_describes_and_loads_arrays(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    for array in ARRAYS:
        np.save(path, array)
        (found,) = described(path)
        assert (found.shape, found.dtype, found.member) == (array.shape, array.dtype, None)
        loaded = found.load()
        assert np.array_equal(loaded, array)
        if array.size and array.ndim:
            assert isinstance(loaded.base, np.memmap)
            assert not loaded.flags.writeable
    path = tmp_path / "x.npz"
    save: Any
    for save in (np.savez, np.savez_compressed):
        save(path, **{f"a{i}": array for i, array in enumerate(ARRAYS)})
        for array, found in zip(ARRAYS, described(path), strict=True):
            assert (found.offset is None) == (save is np.savez_compressed)
            loaded = found.load()
            assert (loaded.dtype, loaded.tolist()) == (array.dtype, array.tolist())
            assert array.size == 0 or not loaded.flags.writeable


def test_only_numbers_and_text_and_nothing_is_unpickled(tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self) -> tuple[Any, ...]:
            return (tmp_path / "was_run").touch, ()

    objects = np.array([Canary()], dtype=object)
    np.save(tmp_path / "x.npy", objects)
    np.savez(tmp_path / "x.npz", a=objects)
    for name in ("x.npy", "x.npz"):
        with pytest.raises(SpecError, match="holds pickled Python objects, and unpickling a file could run any code"):
            described(tmp_path / name)
    assert not (tmp_path / "was_run").exists()
    dtypes: list[Any] = [[("x", "i4"), ("y", "f4")], "datetime64[s]"]
    for dtype in dtypes:
        np.save(tmp_path / "x.npy", np.zeros(3, dtype=dtype))
        with pytest.raises(SpecError, match=r"must hold numbers or text, but '.*x\.npy' has dtype"):
            described(tmp_path / "x.npy")


def test_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(100))
    path.write_bytes(path.read_bytes()[:-1])
    missing = r"must hold 800 bytes \(int64 \(100,\)\), but 799 are left: it is truncated \(file '.*x.npy', byte 128\)"
    with pytest.raises(DataLossError, match=missing):
        described(path)


def test_a_header_that_lies(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    for shape in ("(2**62,)", "(-1,)", "(4611686018427387904, 8)", "(9999999999,)"):
        write_header(path, "<i8", shape)
        with pytest.raises(DataLossError):
            described(path)
    for dtype in ("|S0", "<U0"):  # it asked for 931 GiB: numpy takes a byte for each text of none
        write_header(path, dtype, "(1000000000000,)")
        with pytest.raises(DataLossError, match="the shape is"):
            described(path)


def test_what_numpy_does_not_write(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no arrays")
    with pytest.raises(InvalidArgumentError, match="must hold at least one array"):
        described(path)
    for kind in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(path, "w", kind) as archive, archive.open("a.npy", "w") as file:
            np.lib.format.write_array(file, np.zeros(1 << 12))
        with pytest.raises(InvalidArgumentError, match="must be stored or deflated"):
            described(path)


def test_a_stored_member_is_compared_with_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    array = np.arange(1 << 20)
    np.savez(path, first=array[:9], second=array)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    first, second = described(path)
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
    tracemalloc.start()
    with pytest.raises(InvalidArgumentError, match=r"at most \d+ bytes, .* \(byte \d+\) has 8388736.*max_array_bytes"):
        described(path)
    with pytest.raises(InvalidArgumentError, match=r"at most 1048576 bytes, .* has 8388736"):
        described(path, 1 << 20)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert described(path, 1 << 24)[0].load().shape == (1 << 20,)
    monkeypatch.undo()
    monkeypatch.setattr(numpy_format, "_MAX_DEFLATE_RATIO", 10)
    with pytest.raises(DataLossError, match="no compression makes 8388736 bytes so small"):
        described(path)
