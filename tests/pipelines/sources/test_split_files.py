from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raydist as rd
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.sources import columnar_files
from raydist.pipelines.sources.file_format import FileSplit, SplitFormat
from raydist.pipelines.sources.table_files import FileSplitsOp, SplitFilesOp, TableFilesOp
from tests.contracts.op import check_op, collect, iterate


@final
@dataclass(frozen=True)
class NumbersFormat(SplitFormat):
    """The numbers from `first` to `end`; in file "bad" an error, and file "gone" cannot be opened."""

    name: ClassVar[str] = "numbers"
    meeting: threading.Barrier | None = None

    @property
    def label(self) -> str:
        return ""

    @property
    def spec(self) -> Any:
        return TensorSpec((), np.int64)

    def read_split(self, split: FileSplit) -> list[Item]:
        if self.meeting is not None:
            self.meeting.wait(20)
        if split.path == "gone":
            raise FileNotFoundError(split.path)
        rows: list[Item] = [block_of_rows(list(range(split.first, split.end)))] if split.end > split.first else []
        return [ElementError(rd.DataLossError("bad")), *rows] if split.path == "bad" else rows


def numbers(*splits: tuple[str, int, int], meeting: threading.Barrier | None = None) -> rd.Dataset:
    described = tuple(FileSplit(path, first, end, end - first) for path, first, end in splits)
    return rd.Dataset(SplitFilesOp(FileSplitsOp(described), NumbersFormat(meeting), rd.UNKNOWN_CARDINALITY, "files"))


def test_pieces_in_order_and_errors_at_their_place() -> None:
    splits = ("a", 0, 3), ("a", 3, 3), ("bad", 3, 5), ("gone", 5, 9), ("b", 9, 10)
    found = collect(iterate(numbers(*splits)))
    assert [int(item) if isinstance(item, np.int64) else item[0] for item in found] == [
        *(0, 1, 2, "DataLossError", 3, 4, "FileNotFoundError", 9)
    ]
    check_op(lambda: numbers(*splits))
    check_op(lambda: numbers(*splits).map(lambda x: x * 2).batch(2))


def test_pieces_are_read_at_the_same_time() -> None:
    dataset = numbers(("a", 0, 2), ("a", 2, 4), ("a", 4, 6), meeting=threading.Barrier(3))
    options = rd.Options(threading=rd.ThreadingOptions(private_threadpool_size=3))
    assert [int(x) for x in dataset.with_options(options).as_numpy_iterator()] == list(range(6))


def test_one_piece_at_a_time_is_read_where_one_is_asked_for() -> None:
    iterator = iterate(numbers(("a", 0, 1000), ("gone", 0, 1)))
    assert [int(next(iterator)) for _ in range(1000)] == list(range(1000))
    assert len(json.dumps(iterator.state_dict())) < 500
    with pytest.raises(FileNotFoundError):
        next(iterator)
    iterator.close()


def test_what_follows_is_a_stage_of_its_own() -> None:
    shown = numbers(("a", 0, 4)).map(lambda x: x).filter(lambda x: True).explain()
    assert "1 pieces of files" in shown
    assert [int(x) for x in numbers(("a", 0, 4)).map(lambda x: x + 1).as_numpy_iterator()] == [1, 2, 3, 4]


def test_a_state_of_other_files_is_refused() -> None:
    iterator = iterate(numbers(("a", 0, 1), ("a", 1, 2)))
    collect(iterator)
    state = iterator.state_dict()
    other = iterate(numbers(("a", 0, 1)))
    other.load_state_dict(state)
    with pytest.raises(rd.FailedPreconditionError, match="behind piece 2 of the files, and they have 1 now"):
        next(other)


def write(path: Path, rows: int, group: int) -> str:
    pq.write_table(pa.table({"x": np.arange(rows), "y": np.zeros(rows)}), path, row_group_size=group)
    return str(path)


def test_small_row_groups_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar_files, "_SPLIT_BYTES", 200)
    paths = [write(tmp_path / "a", 100, 10), write(tmp_path / "empty", 0, 10), write(tmp_path / "b", 7, 10)]
    op = rd.Dataset.from_parquet(paths, columns=["x"])._op
    assert isinstance(op, SplitFilesOp)
    assert isinstance(op.splits, FileSplitsOp)
    pieces = [(Path(split.path).name, split.first, split.end, split.num_rows) for split in op.splits.splits]
    assert pieces == [*(("a", i, i + 2, 20) for i in range(0, 10, 2)), ("empty", 0, 1, 0), ("b", 0, 1, 7)]
    check_op(lambda: rd.Dataset.from_parquet(paths, columns=["x"]).batch(9), limit=8)


def test_a_huge_row_group_is_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar_files, "_MAX_SPLIT_BYTES", 200)
    path = write(tmp_path / "a", 100, 50)
    assert isinstance(rd.Dataset.from_parquet(path)._op, TableFilesOp)
    assert [int(row["x"]) for row in rd.Dataset.from_parquet(path).as_numpy_iterator()] == list(range(100))


def test_a_file_that_changed_since(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 20, 5)
    dataset = rd.Dataset.from_parquet(path)
    write(tmp_path / "a", 19, 5)
    with pytest.raises(rd.DataLossError, match=r"must not change .* 0 .. 3 had 20 rows, and now 19 .*/a', byte 0"):
        next(iter(dataset))


def test_the_state_of_a_wide_table_is_small(tmp_path: Path) -> None:
    pq.write_table(pa.table({f"a column with a long name {i}": [1, 2] for i in range(1000)}), tmp_path / "wide")
    iterator = iterate(rd.Dataset.from_parquet(tmp_path / "wide").shuffle(2).batch(1))
    next(iterator)
    assert len(json.dumps(iterator.state_dict())) < 5000
    iterator.close()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_input_workers_read_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar_files, "_SPLIT_BYTES", 200)
    paths = [write(tmp_path / name, 100, 10) for name in "ab"]
    dataset = rd.Dataset.from_parquet(paths, filters=[("x", ">=", 50)]).with_options(rd.Options(num_input_workers=2))
    iterator = dataset.as_numpy_iterator()
    assert [int(row["x"]) for row in iterator] == [*range(50, 100)] * 2
    iterator.close()
