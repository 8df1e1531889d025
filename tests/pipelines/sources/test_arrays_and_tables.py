"""Tensors, tables and NumPy files as sources."""

from __future__ import annotations

import pickle
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raydist as rd
from raydist.core.errors import DataLossError, InvalidArgumentError, SpecError
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.formats import numpy_format
from raydist.pipelines.formats.numpy_format import StoredArray, stored_array, stored_arrays
from tests.contracts.op import check_op


def test_what_cannot_be_sliced() -> None:
    cases: list[tuple[Any, str]] = [
        (3, "got a scalar: 3"),
        (([1], 2), "got a scalar '1': 2"),
        (("text", [1]), "got a scalar '0'"),
        (([1, 2], [1, 2, 3]), r"same first dimension, got \{'0': 2, '1': 3\}"),
        ((), "at least one tensor"),
    ]
    for tensors, message in cases:
        with pytest.raises(InvalidArgumentError, match=message):
            Dataset.from_tensor_slices(tensors)
    with pytest.raises(SpecError, match="rectangular"):
        Dataset.from_tensor_slices([[1], [1, 2]])
    with pytest.raises(SpecError, match="A leaf must be"):
        Dataset.from_tensors({1, 2})
    nothing = Dataset.from_tensor_slices(np.zeros((0, 3)))
    assert (len(nothing), list(nothing.batch(2))) == (0, [])
    assert nothing.element_spec == TensorSpec((3,), np.float64)


def test_arrays_are_not_copied_and_what_is_handed_out_is_not_the_source() -> None:
    makers: list[Any] = [Dataset.from_tensor_slices, lambda x: Dataset.from_tensors(x).unbatch()]
    for make in makers:
        for dataset in (make(np.zeros((4, 2))), pickle.loads(pickle.dumps(make(np.zeros((4, 2)))))):
            for row in dataset.repeat(2).as_numpy_iterator():
                assert not row.any()
                row[:] = 1
    source = np.zeros((4, 2))
    dataset = Dataset.from_tensor_slices(source)
    source[3] = 7
    assert list(dataset.as_numpy_iterator())[3].tolist() == [7, 7]


@pytest.fixture
def table() -> pa.Table:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(40, dtype=np.int32).reshape(10, 2, 2))
    columns = {
        "t": tensors,
        "l": pa.array([[0.5] * i for i in range(10)], pa.list_(pa.float32())),
        "s": pa.array([str(i) for i in range(10)]),
        "n": pa.array(range(10), pa.uint8()),
    }
    whole = pa.table(columns)
    return pa.concat_tables([whole.slice(0, 3), whole.slice(3, 0), whole.slice(3)])


def elements() -> list[dict[str, Any]]:
    return [
        {
            "t": np.arange(4 * i, 4 * i + 4, dtype=np.int32).reshape(2, 2),
            "l": np.full(i, 0.5, np.float32),
            "s": str(i),
            "n": np.uint8(i),
        }
        for i in range(10)
    ]


def test_rows_are_dicts(table: pa.Table) -> None:
    dataset = rd.Dataset.from_arrow(table)
    for element in dataset:  # what is handed out may be written
        element["t"].zero_()
        element["l"].zero_()
    check_op(lambda: dataset, elements())
    check_op(lambda: rd.Dataset.from_arrow(table.slice(2, 5)), elements()[2:7])
    check_op(lambda: rd.Dataset.from_arrow(table.drop(["l"])).shuffle(4).batch(3))


def test_whatever_can_be_read_into_a_table(table: pa.Table) -> None:
    foreign = type("Foreign", (), {"__arrow_c_stream__": table.__arrow_c_stream__})()
    for source in (table.to_reader(), table.combine_chunks().to_batches()[0], foreign):
        dataset = rd.Dataset.from_arrow(source)
        assert len(dataset) == 10
        for _ in range(2):  # a reader too can be iterated again
            assert [element["s"] for element in dataset] == [str(i) for i in range(10)]
    batches = rd.Dataset.from_tensor_slices({"x": np.eye(3), "y": ["a", "b", "c"]}).batch(2).arrow_batches()
    found = rd.Dataset.from_arrow(pa.Table.from_batches(list(batches)))
    assert [row["x"].tolist() for row in found] == np.eye(3).tolist()
    with pytest.raises(rd.SpecError, match=r"needs a pyarrow Table.*got \[1, 2\] \(list\)"):
        rd.Dataset.from_arrow([1, 2])
    with pytest.raises(rd.SpecError, match="Column 'when' must hold numbers"):
        rd.Dataset.from_arrow(pa.table({"when": pa.array([(1, 2, 3)], pa.month_day_nano_interval())}))


def test_dates_are_whole_numbers_in_torch() -> None:
    table = pa.table(
        {"d": pa.array([1, 2, 3], pa.date32()), "t": pa.array([[4], [5, 6], []], pa.list_(pa.time64("us")))}
    )
    dataset = rd.Dataset.from_arrow(table)
    assert dataset.element_spec["d"] == rd.TensorSpec((), "datetime64[D]")
    assert [row["d"].dtype for row in dataset.as_numpy_iterator()] == [np.dtype("datetime64[D]")] * 3
    batch = next(iter(dataset.padded_batch(2)))
    assert (batch["d"].tolist(), batch["t"].tolist()) == ([1, 2], [[4, 0], [5, 6]])
    later = dataset.map(lambda row: {"d": row["d"] + np.timedelta64(1, "D"), "weekday": row["d"].astype(int) % 7})
    check_op(lambda: later.shuffle(3, seed=1).batch(2))
    (rows,) = later.batch(3).as_numpy_iterator()
    assert rows["d"].tolist() == np.array([2, 3, 4], "datetime64[D]").tolist()
    (arrow,) = later.batch(3).arrow_batches()
    assert arrow.column("d").to_pylist() == [2, 3, 4]


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    path = tmp_path / "x.npz"
    np.savez(path, image=np.arange(12, dtype=">u2").reshape(4, 3), label=np.arange(4), name=np.array(list("abcd")))
    return path


def test_rows_of_an_npy(tmp_path: Path) -> None:
    array = np.arange(6.0).reshape(3, 2)
    np.save(tmp_path / "x.npy", array)
    for source in (tmp_path / "x.npy", str(tmp_path / "x.npy"), f"file://{tmp_path}/x.npy", array):
        dataset = rd.Dataset.from_numpy(source)
        assert [row.tolist() for row in dataset] == array.tolist()
        assert dataset.element_spec == rd.TensorSpec((2,), "float64")
        assert len(dataset) == 3
    check_op(lambda: rd.Dataset.from_numpy(tmp_path / "x.npy"), list(array))


def test_rows_of_an_npz_are_dicts(npz: Path) -> None:
    dataset = rd.Dataset.from_numpy(npz)
    assert dataset.element_spec == {
        "image": rd.TensorSpec((3,), "uint16"),
        "label": rd.TensorSpec((), "int64"),
        "name": rd.TensorSpec((), str),
    }
    second = list(dataset.as_numpy_iterator())[1]
    assert (second["image"].tolist(), second["label"], second["name"]) == ([3, 4, 5], 1, "b")
    assert second["image"].dtype == np.uint16  # the machine's byte order
    check_op(lambda: dataset.batch(3))


def test_only_the_description_travels_and_compressed_arrays_are_loaded_once(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", a=np.random.default_rng(0).random(100_000))
    dataset = rd.Dataset.from_numpy(tmp_path / "x.npz")
    first = next(dataset.as_numpy_iterator())
    sent = pickle.dumps(dataset)
    assert len(sent) < 10_000
    assert next(pickle.loads(sent).as_numpy_iterator()) == first
    (tmp_path / "x.npz").unlink()
    assert next(dataset.as_numpy_iterator()) == first


def test_errors_name_the_file(tmp_path: Path) -> None:
    np.save(tmp_path / "scalar.npy", np.array(3))
    np.savez(tmp_path / "uneven.npz", a=np.arange(3), b=np.arange(4))
    (tmp_path / "bad.npy").write_bytes(b"not an array")
    (tmp_path / "folder.npy").mkdir()
    cases: list[tuple[str, type[Exception], str]] = [
        ("missing.npy", rd.NotFoundError, "must exist"),
        ("scalar.npy", rd.InvalidArgumentError, r"needs arrays with a first dimension to slice, got shapes .*\(\)"),
        ("uneven.npz", rd.InvalidArgumentError, r"same first dimension, got shapes \{'a': \(3,\), 'b': \(4,\)\}"),
        ("bad.npy", rd.DataLossError, "must be a whole .npy or .npz file"),
        ("folder.npy", rd.InvalidArgumentError, "is a directory"),
    ]
    for name, kind, message in cases:
        with pytest.raises(kind, match=message):
            rd.Dataset.from_numpy(tmp_path / name)
    (tmp_path / "x.csv").touch()
    with pytest.raises(rd.InvalidArgumentError, match=r"files named \.npy or \.npz, got '.*x\.csv'"):
        rd.Dataset.from_numpy(tmp_path / "x.csv")
    for uri, message in (
        ("s3://bucket/x.npy", "needs a local path, got 's3"),
        ("file://other/x.npy", "the host 'other'"),
    ):
        with pytest.raises(rd.InvalidArgumentError, match=message):
            rd.Dataset.from_numpy(uri)


def test_a_file_that_shrinks_is_an_error_and_one_that_is_removed_is_read_on(tmp_path: Path) -> None:
    for name, save in (("x.npy", np.save), ("x.npz", np.savez)):
        path = tmp_path / name
        save(path, np.arange(20_000))
        iterator = rd.Dataset.from_numpy(path).batch(1000).as_numpy_iterator()
        next(iterator)
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(rd.DataLossError, match="must not change while .* the file has 5000 now .*byte 5000"):
            for _ in iterator:
                pass
    np.save(tmp_path / "x.npy", np.arange(5000))
    iterator = rd.Dataset.from_numpy(tmp_path / "x.npy").batch(1000).as_numpy_iterator()
    next(iterator)
    (tmp_path / "x.npy").unlink()
    assert [int(batch[0]) for batch in iterator] == [1000, 2000, 3000, 4000]


def test_checksums_are_compared_before_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.arange(100_000))
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    iterator = rd.Dataset.from_numpy(path).as_numpy_iterator()
    for _ in range(3):  # the error of each row
        with pytest.raises(rd.DataLossError, match="checksum of 'a'"):
            next(iterator)
        path.with_name("moved.npz").exists() or path.rename(path.with_name("moved.npz"))  # it is read only once
    path.with_name("moved.npz").rename(path)
    assert len(list(rd.Dataset.from_numpy(path, verify=False).batch(1000))) == 100
    with pytest.raises(rd.DataLossError, match="checksum of 'a'"):
        list(pickle.loads(pickle.dumps(rd.Dataset.from_numpy(path).batch(9))).take(1))
    with pytest.raises(rd.InvalidArgumentError, match="max_array_bytes must be >= 1"):
        rd.Dataset.from_numpy(path, max_array_bytes=0)


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
