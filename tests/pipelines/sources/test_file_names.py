from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

import raydist as rd
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.run.plan import open_iterator
from raydist.pipelines.sources.file_names import FileNames, names_op
from tests.contracts.op import check_op, collect


def opened(op: DatasetOp) -> FileNames:
    return FileNames(open_iterator(op, seed=0, epoch=0, options=Options(), executor=InlineExecutor()))


def failing_names() -> DatasetOp:
    """x1, an error, x3."""
    return Dataset.from_tensor_slices([1, 0, 3]).map(lambda x: f"x{x}" if x else {}[x])._op


def test_takes_names_one_by_one() -> None:
    names = opened(names_op(["a", b"b", Path("c")]))
    assert [names.take() for _ in range(3)] == ["a", "b", "c"]
    assert names.num_taken == 3
    with pytest.raises(StopIteration):
        names.take()
    assert names.num_taken == 3
    names.close()


def test_an_error_counts_as_a_name() -> None:
    names = opened(failing_names())
    assert names.take() == "x1"
    with pytest.raises(KeyError):
        names.take()
    assert names.num_taken == 2
    assert names.take() == "x3"
    names.close()


def test_retakes_the_wanted_names() -> None:
    names = opened(failing_names())
    assert names.retake(2, [0]) == {0: "x1"}
    assert names.num_taken == 2
    assert names.take() == "x3"
    assert opened(names_op("x")).retake(5, [0, 4]) == {0: "x"}  # fewer names than there were


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


def test_feeds_a_reader(folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"x\n")
    (folder / "d.txt").write_bytes(b"y\n")
    names = rd.Dataset.list_files(f"{folder}/*.txt", shuffle=False)
    check_op(lambda: rd.TextLineDataset(names), [b"x", b"y"])


def test_uris() -> None:
    system = fsspec.filesystem("memory")
    system.pipe({"/listed/b.x": b"", "/listed/a.x": b""})
    found = list(rd.Dataset.list_files("memory://listed/*.x", shuffle=False))
    assert [name.rpartition("/")[2] for name in found] == ["a.x", "b.x"]
    assert list(rd.TextLineDataset(found)) == []
    system.rm("/listed", recursive=True)


def test_nothing_matches(tmp_path: Path) -> None:
    with pytest.raises(rd.NotFoundError, match=r"none matches '.*/\*\.txt'"):
        rd.Dataset.list_files(f"{tmp_path}/*.txt")
    with pytest.raises(rd.InvalidArgumentError, match="at least one pattern, got an empty list"):
        rd.Dataset.list_files([])
    with pytest.raises(rd.InvalidArgumentError, match="one that fsspec knows, got 'nosuch://x/\\*'"):
        rd.Dataset.list_files("nosuch://x/*")
    with pytest.raises(rd.SpecError, match="got 3"):
        rd.Dataset.list_files(3)


def test_file_uris(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for prefix in ("", "file://", "file://localhost"):
        assert [str(name) for name in rd.Dataset.list_files(f"{prefix}{tmp_path}/*")] == [f"{prefix}{tmp_path}/a"]
    with pytest.raises(rd.InvalidArgumentError, match="must be of this machine"):
        rd.Dataset.list_files("file://other/x*")
