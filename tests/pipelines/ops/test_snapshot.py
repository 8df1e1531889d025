from __future__ import annotations

import itertools
import uuid
from pathlib import Path
from typing import Any

import pytest

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.stored import write
from raydist.pipelines.stored.cached_epoch import CachedEpochSettings, Recorder
from tests.contracts.op import check_op, collect, iterate
from tests.pipelines.model import recorder


def counted(path: Any, **arguments: Any) -> tuple[Dataset, list[int]]:
    calls: list[int] = []
    return Dataset.range(6).map(recorder(calls)).snapshot(path, **arguments), calls


def alternately(shards: Dataset) -> Dataset:
    return shards.interleave(lambda shard: shard, cycle_length=9)


def test_the_first_epoch_writes_and_the_others_read(tmp_path: Path) -> None:
    for compression, suffix in (("AUTO", ".lz4"), (None, ".arrows"), ("GZIP", ".gz")):
        dataset, calls = counted(tmp_path / suffix, compression=compression)
        assert [[int(x) for x in dataset] for _ in range(3)] == [[0, 1, 2, 3, 4, 5]] * 3
        assert calls == [0, 1, 2, 3, 4, 5]
        assert [part.suffix for part in (tmp_path / suffix).glob("*/part-*")] == [suffix]


def test_the_same_pipeline_finds_it_and_another_one_does_not(tmp_path: Path) -> None:
    def shuffled(offset: int, seed: int | None = None) -> Dataset:
        dataset = Dataset.range(30).map(lambda x: x + offset).shuffle(30).snapshot(tmp_path)
        return dataset if seed is None else dataset.with_options(Options(seed=seed))

    first = [int(x) for x in shuffled(0)]
    assert [int(x) for x in shuffled(0)] == [int(x) for x in shuffled(0).repeat(2).skip(30)] == first
    assert len(list(tmp_path.iterdir())) == 1
    assert sorted(int(x) for x in shuffled(1)) == list(range(1, 31))
    assert [int(x) for x in shuffled(0, seed=4)] != [int(x) for x in shuffled(0, seed=5)]
    assert len(list(tmp_path.iterdir())) == 4


def test_shards_and_readers(tmp_path: Path) -> None:
    remote, calls = counted(f"memory://{uuid.uuid4().hex}/x", shard_func=lambda x: x % 2)
    assert [[int(x) for x in remote] for _ in range(2)] == [[0, 2, 4, 1, 3, 5]] * 2
    assert len(calls) == 6
    dataset, calls = counted(tmp_path, shard_func=lambda x: x // 2, reader_func=alternately)
    assert [[int(x) for x in dataset] for _ in range(2)] == [[0, 2, 4, 1, 3, 5]] * 2
    lively, _ = counted(tmp_path, reader_func=lambda shards: shards.flat_map(lambda shard: shard.shuffle(6)))
    epochs = [[int(x) for x in lively] for _ in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 4
    assert len(calls) == 6


def test_a_second_iterator_passes_by_while_the_first_writes(tmp_path: Path) -> None:
    dataset, calls = counted(tmp_path)
    first, second = iter(dataset), iter(dataset)
    assert [[int(x) for x in pair] for pair in zip(first, second, strict=True)] == [[x, x] for x in range(6)]
    assert len(list(dataset)) == 6
    assert len(calls) == 12


def test_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "_CHUNK_ROWS", 3)
    number = itertools.count()

    def noisy(path: Path) -> Dataset:
        source = Dataset.range(7).shuffle(4).map(lambda x, *, rng: (x, str(rng.random())))
        return source.snapshot(path, shard_func=lambda x, text: x % 3, reader_func=alternately)

    check_op(lambda: noisy(tmp_path / str(next(number))).repeat(2))  # a state is loaded where nothing is there yet
    collect(iterate(noisy(tmp_path / "x")))
    check_op(lambda: noisy(tmp_path / "x").repeat(2))


def test_files_that_another_seed_must_make_again(tmp_path: Path) -> None:
    dataset, _ = counted(tmp_path, reader_func=alternately)
    list(dataset.with_options(Options()))  # with a seed of its own
    reading = iterate(dataset)
    collect(reading, 2)
    for file in [*tmp_path.glob("*/*"), *tmp_path.glob("*")]:
        file.unlink() if file.is_file() else file.rmdir()
    resumed = iterate(dataset)
    resumed.load_state_dict(reading.state_dict())
    with pytest.raises(FailedPreconditionError, match="those that the state was saved with"):
        next(resumed)


def test_an_error_ends_a_pass_in_shards(tmp_path: Path) -> None:
    dataset = Dataset.range(3).map(lambda x: 6 // int(x - 1)).snapshot(tmp_path, shard_func=lambda x: x % 2)
    assert [item[0] for item in collect(iterate(dataset))] == ["ZeroDivisionError"]
    assert [entry for entry in tmp_path.rglob("*") if entry.is_file()] == []
    in_order = Dataset.range(3).map(lambda x: 6 // int(x - 1)).snapshot(tmp_path).ignore_errors()
    assert [[int(x) for x in in_order] for _ in range(2)] == [[-6, 6]] * 2


def test_shards_of_a_dataset_without_an_end(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="has no end"):
        Dataset.counter().snapshot(tmp_path, reader_func=alternately)
    assert [int(x) for x in Dataset.counter().snapshot(tmp_path).take(3)] == [0, 1, 2]


def test_bad_functions_and_arguments(tmp_path: Path) -> None:
    assert collect(iterate(counted(tmp_path, shard_func=lambda x: 0.5)[0]))[0][0] == "SpecError"
    assert [entry for entry in tmp_path.rglob("*") if entry.is_file()] == []
    no_dataset, _ = counted(tmp_path, reader_func=len)
    with pytest.raises(TypeError):
        list(no_dataset)
    with pytest.raises(InvalidArgumentError, match="compression must be None or one of"):
        counted(tmp_path, compression="auto")
    with pytest.raises(InvalidArgumentError, match="shard_func must be a function or None, got 3"):
        counted(tmp_path, shard_func=3)


def test_shards_that_another_writer_finishes_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = counted(tmp_path, shard_func=is_odd)
    second, calls = counted(tmp_path, shard_func=is_odd)
    begin = CachedEpochSettings.recorder

    def begin_after_the_first(settings: CachedEpochSettings) -> Recorder:
        monkeypatch.setattr(CachedEpochSettings, "recorder", begin)
        list(first)
        return begin(settings)

    monkeypatch.setattr(CachedEpochSettings, "recorder", begin_after_the_first)
    assert [int(x) for x in second] == [0, 2, 4, 1, 3, 5]
    assert calls == []


def is_odd(x: Any) -> int:
    return int(x % 2)
