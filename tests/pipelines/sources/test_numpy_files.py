from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raydist as rd
from tests.contracts.op import check_op, collect, same


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


def test_shuffled_like_arrays_in_memory(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"x": np.arange(50).reshape(25, 2), "y": np.array([b"%d" % i for i in range(25)])}
    np.savez(tmp_path / "x.npz", **arrays)
    np.savez_compressed(tmp_path / "y.npz", **arrays)
    first, second, third = (
        collect(rd.Dataset.from_numpy(source).shuffle(25, seed=1).repeat(2).batch(4).as_numpy_iterator())
        for source in (tmp_path / "x.npz", tmp_path / "y.npz", arrays)
    )
    assert len(first) == 13
    assert same(first, third)
    assert same(second, third)


def test_only_the_description_travels_and_compressed_arrays_are_loaded_once(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", a=np.random.default_rng(0).random(100_000))
    dataset = rd.Dataset.from_numpy(tmp_path / "x.npz")
    first = next(dataset.as_numpy_iterator())
    sent = pickle.dumps(dataset)
    assert len(sent) < 10_000
    assert next(pickle.loads(sent).as_numpy_iterator()) == first
    (tmp_path / "x.npz").unlink()
    assert next(dataset.as_numpy_iterator()) == first


def test_what_is_handed_out_may_be_written(npz: Path) -> None:
    before = npz.read_bytes()
    for element in rd.Dataset.from_numpy(npz):
        element["image"].zero_()
        element["label"].zero_()
    assert [int(x["label"]) for x in rd.Dataset.from_numpy(npz)] == [0, 1, 2, 3]
    assert npz.read_bytes() == before


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
    with pytest.raises(rd.InvalidArgumentError, match="needs a local path, got 's3://bucket/x.npy'"):
        rd.Dataset.from_numpy("s3://bucket/x.npy")


def test_a_file_that_shrinks_is_an_error_and_one_that_is_removed_is_read_on(tmp_path: Path) -> None:
    for name, save in (("x.npy", np.save), ("x.npz", np.savez)):
        path = tmp_path / name
        save(path, np.arange(100_000))
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
