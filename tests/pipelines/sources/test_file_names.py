from __future__ import annotations

from pathlib import Path

import pytest

import raydist as rd
from tests.contracts.op import check_op, collect


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "c.csv", "d.txt"):
        (tmp_path / name).touch()
    return tmp_path


def test_sorted_names(folder: Path) -> None:
    names = [str(folder / name) for name in ("a.txt", "b.txt", "d.txt")]
    check_op(lambda: rd.Dataset.list_files(f"{folder}/*.txt", shuffle=False), list(names))
    check_op(lambda: rd.Dataset.list_files([folder / "?.txt", folder / "[ab].*"], shuffle=False), list(names))
    dataset = rd.Dataset.list_files(f"file://{folder}/*.txt", shuffle=False)
    assert list(dataset) == [f"file://{name}" for name in names]
    assert dataset.element_spec == rd.TensorSpec((), str)
    assert len(dataset) == 3


def test_shuffled_by_default(folder: Path) -> None:
    for number in range(20):
        (folder / f"{number}.txt").touch()
    dataset = rd.Dataset.list_files(f"{folder}/*.txt", seed=1)
    first, second = collect(dataset.as_numpy_iterator()), collect(dataset.as_numpy_iterator())
    assert first != second
    assert sorted(first) == sorted(second) == sorted(map(str, folder.glob("*.txt")))
    assert collect(rd.Dataset.list_files(f"{folder}/*.txt", seed=1).as_numpy_iterator()) == first
    check_op(lambda: rd.Dataset.list_files(f"{folder}/*.txt"))


def test_feeds_a_reader_and_an_error_among_names_takes_its_place(folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"x\n")
    (folder / "d.txt").write_bytes(b"y\n")
    names = rd.Dataset.list_files(f"{folder}/*.txt", shuffle=False)
    check_op(lambda: rd.TextLineDataset(names), [b"x", b"y"])
    broken = rd.Dataset.from_tensor_slices([1, 0, 2]).map(lambda x: f"{folder}/{'ad'[2 // int(x) - 1]}.txt")
    error = ("ZeroDivisionError", "integer division or modulo by zero")
    for reads in (1, 2):
        check_op(lambda: rd.TextLineDataset(broken, num_parallel_reads=reads), [b"y", error, b"x"])  # noqa: B023


def test_nothing_matches(tmp_path: Path) -> None:
    with pytest.raises(rd.NotFoundError, match=r"none matches '.*/\*\.txt'"):
        rd.Dataset.list_files(f"{tmp_path}/*.txt")
    with pytest.raises(rd.InvalidArgumentError, match="at least one pattern, got an empty list"):
        rd.Dataset.list_files([])
    with pytest.raises(rd.InvalidArgumentError, match="one that fsspec knows, got 'nosuch://x/\\*'"):
        rd.Dataset.list_files("nosuch://x/*")
    with pytest.raises(rd.SpecError, match="got 3"):
        rd.Dataset.list_files(3)
