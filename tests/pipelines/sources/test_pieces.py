"""Rows of table files, file after file and in pieces that workers read, against files that this process reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raydist import Dataset, FailedPreconditionError, TFRecordDataset, TFRecordWriter
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.sources import row_lines, table_files
from raydist.pipelines.sources.file_format import TableReader
from raydist.pipelines.sources.table_files import FileRows
from tests.contracts.op import MakeExecutor, collect, iterate, same
from tests.pipelines.storing_executor import StoringExecutor


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "_LEAST_BYTES", 60)
    monkeypatch.setattr(table_files, "_MOST_BYTES", 60)
    monkeypatch.setattr(table_files, "_FIRST_ROWS", 3)
    monkeypatch.setattr(row_lines, "_MIN_LINES", 3)


def decode(record: Any) -> Any:
    return b"<" + record + b">"


WAYS: dict[str, Callable[[Any], Dataset]] = {
    "one after the other": lambda names: TFRecordDataset(names),
    "in turn": lambda names: TFRecordDataset(names, num_parallel_reads=3),
    "interleave": lambda names: Dataset.from_tensor_slices(names).interleave(TFRecordDataset, cycle_length=2),
    "interleave blocks": lambda names: Dataset.from_tensor_slices(names).interleave(TFRecordDataset, 3, 2),
    "flat_map": lambda names: Dataset.from_tensor_slices(names).flat_map(TFRecordDataset),
}


def write(folder: Path, sizes: list[int], damaged: int | None = None) -> list[str]:
    names = []
    for number, size in enumerate(sizes):
        path = folder / f"{number}.tfrecord"
        with TFRecordWriter(str(path)) as writer:
            for row in range(size):
                writer.write(b"%d-%d" % (number, row) * (1 + row % 5))
        if number == damaged and size:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0x55
            path.write_bytes(bytes(data))
        names.append(str(path))
    return names


def check_states(make: Callable[[], Dataset], data: st.DataObject) -> None:
    """An epoch in pieces on workers is that of this process, and a state goes on with and without workers."""
    expected = collect(iterate(make()))
    found = iterate(make(), StoringExecutor)
    done = data.draw(st.integers(0, len(expected)))
    assert same(collect(found, done), expected[:done])
    state = json.loads(json.dumps(found.state_dict()))
    assert same(collect(found), expected[done:])
    executors: list[MakeExecutor] = [StoringExecutor, lambda options: InlineExecutor()]
    for executor in executors:
        resumed = iterate(make(), executor)
        resumed.load_state_dict(state)
        assert same(collect(resumed), expected[done:])
        resumed.close()


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(way=st.sampled_from(sorted(WAYS)), data=st.data())
def test_records_errors_order_and_states(way: str, data: st.DataObject, tmp_path: Path) -> None:
    sizes = data.draw(st.lists(st.integers(0, 25), min_size=1, max_size=5))
    names = write(tmp_path, sizes, data.draw(st.sampled_from([None, 0, len(sizes) - 1])))
    if data.draw(st.booleans()):
        names.insert(data.draw(st.integers(0, len(names))), str(tmp_path / "missing"))
    check_states(lambda: WAYS[way](names).shuffle(4, seed=1).map(decode).batch(3), data)


def write_tables(kind: str, folder: Path, sizes: list[int], damaged: bool) -> list[str]:
    names = []
    for number, size in enumerate(sizes):
        path = folder / f"{number}.{kind}"
        rows = [(number * 100 + row, "x" * (row % 7)) for row in range(size)]
        lines = [f"{n},{text}" if kind == "csv" else json.dumps({"n": n, "text": text}) for n, text in rows]
        if damaged and size:
            lines[size // 2] = "no row"
        path.write_text("\n".join([*(["n,text"] if kind == "csv" else []), *lines, ""]))
        names.append(str(path))
    return names


TABLES: dict[str, Callable[[Any], Dataset]] = {
    "csv": lambda names: Dataset.from_csv(names, column_types={"n": int, "text": str}),
    "json": lambda names: Dataset.from_json(names),
}


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(sorted(TABLES)), data=st.data())
def test_rows_of_tables(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    sizes = data.draw(st.lists(st.integers(2, 25), min_size=1, max_size=5))
    names = write_tables(kind, tmp_path, sizes, damaged=False)
    source = TABLES[kind](names)
    if data.draw(st.booleans()):
        write_tables(kind, tmp_path, sizes, damaged=True)
    is_shuffled = data.draw(st.booleans())  # a shuffle reads its input again to resume

    def make() -> Dataset:
        rows = Dataset(source._op).shuffle(4, seed=1) if is_shuffled else Dataset(source._op)
        return rows.map(lambda row: (row["n"], row["text"])).batch(3)

    check_states(make, data)


def refuse_to_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = FileRows._open

    def on_workers(rows: FileRows, path: str) -> TableReader:
        assert rows.on_workers
        return open_file(rows, path)

    monkeypatch.setattr(FileRows, "_open", on_workers)


def test_a_state_of_more_files_is_refused(tmp_path: Path) -> None:
    names = [str(tmp_path / f"{number}.csv") for number in range(3)]
    for name in names:
        Path(name).write_text("x\n1\n")
    first, other = (Dataset.from_csv(some).as_numpy_iterator() for some in (names, names[:1]))
    next(first), next(first), next(first)
    other.load_state_dict(first.state_dict())
    with pytest.raises(FailedPreconditionError, match="it is of file 3, and from_csv has 1 files"):
        next(other)


def test_saved_elements_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Dataset.range(90).map(lambda n: (n, bytes(range(n % 5))))
    saved.save(str(tmp_path / "saved"), shard_func=lambda n, text: n % 3)
    expected = collect(iterate(_numbers_of(Dataset.load(str(tmp_path / "saved")))))
    assert sorted(np.concatenate(expected).tolist()) == list(range(90))
    refuse_to_read_here(monkeypatch)
    found = iterate(_numbers_of(Dataset.load(str(tmp_path / "saved"))), StoringExecutor)
    assert same(collect(found), expected)


def _numbers_of(loaded: Dataset) -> Dataset:
    return loaded.shuffle(5, seed=2).batch(9).map(lambda numbers, texts: numbers)


def test_this_process_reads_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = write(tmp_path, [20, 20])
    executor = StoringExecutor()
    refuse_to_read_here(monkeypatch)
    found = collect(iterate(TFRecordDataset(names).batch(4).map(len), lambda options: executor))
    assert [int(x) for x in found] == [4] * 10
    assert executor.num_fetched > 0
