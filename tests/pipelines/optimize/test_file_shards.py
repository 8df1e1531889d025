"""Whole files for each worker: which rows each of them reads, whatever reads the files, and what cannot be shared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raydist.core.errors import InvalidArgumentError, NotFoundError
from raydist.dataset import Dataset
from raydist.dataset.readers import FixedLengthRecordDataset, TextLineDataset
from raydist.options import Options
from raydist.pipelines.optimize.file_shards import obstacle_to_files, shard_files

ROWS = (3, 0, 2, 5, 1)  # of each file; one is empty


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    for number, size in enumerate(ROWS):
        names = [f"{number}{row}" for row in range(size)]
        (root / f"{number}.txt").write_text("".join(f"{name}\n" for name in names))
        (root / f"{number}.csv").write_text("".join(f"{name}\n" for name in ["name", *names]))
        (root / f"{number}.bin").write_bytes("".join(names).encode())
        pq.write_table(pa.table({"name": pa.array(names, pa.string())}), root / f"{number}.parquet")
    return root


def paths(folder: Path, suffix: str) -> list[str]:
    return [str(folder / f"{number}.{suffix}") for number in range(len(ROWS))]


def text(row: Any) -> str:
    row = row["name"] if isinstance(row, dict) else row
    return row.decode() if isinstance(row, bytes) else str(row).zfill(2)


def rows(dataset: Dataset, num_workers: int, worker: int) -> list[str]:
    return [text(row) for row in Dataset(shard_files(dataset._op, num_workers, worker)).as_numpy_iterator()]


MAKERS: dict[str, Callable[[Path], Dataset]] = {
    "records": lambda folder: TextLineDataset(paths(folder, "txt")),
    "records of names": lambda folder: TextLineDataset(Dataset.list_files(str(folder / "*.txt"), shuffle=False)),
    "fixed": lambda folder: FixedLengthRecordDataset(paths(folder, "bin"), 2),
    "rows": lambda folder: Dataset.from_csv(paths(folder, "csv"), column_types={"name": str}),
    "pieces": lambda folder: Dataset.from_parquet(paths(folder, "parquet")),
    "flat_map": lambda folder: Dataset.from_tensor_slices(paths(folder, "txt")).flat_map(TextLineDataset),
    "what follows": lambda folder: TextLineDataset(paths(folder, "txt")).map(lambda x: x).batch(2).unbatch(),
    "counted": lambda folder: TextLineDataset(paths(folder, "txt")).assert_cardinality(sum(ROWS)),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_worker_w_reads_files_w_and_every_so_many(folder: Path, maker: str) -> None:
    dataset = MAKERS[maker](folder)
    for num_workers in (1, 2, 5):
        for worker in range(num_workers):
            expected = [f"{n}{row}" for n in range(worker, len(ROWS), num_workers) for row in range(ROWS[n])]
            assert rows(dataset, num_workers, worker) == expected, f"worker {worker} of {num_workers}"
    if maker not in ("fixed", "what follows", "counted"):
        with pytest.raises(InvalidArgumentError, match=r"one file for each of 6 workers.* 5 in this.*DATA.*more files"):
            shard_files(dataset._op, 6, 0)


def test_every_input_is_sharded_but_not_the_choices_between_them(folder: Path) -> None:
    lines = TextLineDataset(paths(folder, "txt"))
    both = Dataset.choose_from_datasets([lines, lines], Dataset.from_tensor_slices([0, 1]).repeat(), False)
    assert rows(both, 2, 0) == [row for row in rows(lines, 2, 0) for _ in range(2)]
    assert rows(lines.concatenate(lines), 2, 1) == rows(lines, 2, 1) * 2
    pair = Dataset(shard_files(Dataset.zip(lines, lines)._op, 2, 1))
    assert [text(a) + text(b) for a, b in pair.as_numpy_iterator()] == [row * 2 for row in rows(lines, 2, 1)]


def test_what_stands_at_two_places_keeps_one_order(folder: Path) -> None:
    names = Dataset.list_files(str(folder / "*.txt"))
    lines = names.flat_map(TextLineDataset).shuffle(9)
    for twice in (
        Dataset.zip(lines.map(lambda line: line), lines.map(lambda line: line + b"")),
        Dataset.zip(names.flat_map(TextLineDataset), TextLineDataset(names)),
    ):
        for worker in range(2):
            sharded = shard_files(twice.with_options(Options(seed=3))._op, 2, worker)
            pairs = list(Dataset(sharded).as_numpy_iterator())
            assert len(pairs) == sum(ROWS[worker::2])
            assert all(first == second for first, second in pairs)


def test_fewer_files_that_only_reading_tells(folder: Path) -> None:
    names = Dataset.list_files(str(folder / "*.txt"), shuffle=False).filter(lambda name: name.endswith("0.txt"))
    dataset = TextLineDataset(names)
    assert rows(dataset, 2, 0) == ["00", "01", "02"]
    with pytest.raises(InvalidArgumentError, match="one file for each of 2 workers, but there are fewer"):
        rows(dataset, 2, 1)


def test_what_cannot_be_shared_out(folder: Path) -> None:
    lines = TextLineDataset(paths(folder, "txt"))
    for dataset, reason in (
        (Dataset.range(4).batch(2), "reads no files"),
        (Dataset.zip(lines, Dataset.range(4)), "reads no files"),
        (Dataset.range(4).flat_map(Dataset.range), "reads no files"),
        (Dataset.range(0).flat_map(Dataset.range), "reads no files"),
        (lines.unique(), "must see the elements of all files"),
        (lines.cache("somewhere"), "would keep the elements"),
        (lines.snapshot("somewhere"), "would keep the elements"),
    ):
        assert reason in str(obstacle_to_files(dataset._op)), dataset
        with pytest.raises(NotFoundError, match=rf"AutoShardPolicy\.FILE needs.*{reason}.*DATA"):
            shard_files(dataset._op, 2, 0)


def test_a_function_that_opens_a_file_itself_reads_files() -> None:
    def opened(path: Any) -> Dataset:
        with Path(str(path)).open() as lines:
            return Dataset.from_tensor_slices(lines.readlines())

    dataset = Dataset.from_tensor_slices(["nowhere.txt", "nor here.txt"]).flat_map(opened)
    assert obstacle_to_files(dataset._op) is None
