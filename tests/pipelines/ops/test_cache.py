"""Elements that are kept, in memory and in files: `cache` and `snapshot`."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydist.core.errors import DataLossError, FailedPreconditionError, InvalidArgumentError
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.stored import write
from raydist.pipelines.stored.containers import ChunkWriter
from tests.contracts.op import collect, iterate, same
from tests.pipelines.tables import recorder


def test_a_copy_begins_empty_and_another_seed_reads_again() -> None:
    dataset, calls = counted(3)
    assert len(list(dataset)) == len(list(pickle.loads(pickle.dumps(dataset)))) == 3
    for seed in (1, 1, 2):
        assert len(list(dataset.with_options(Options(seed=seed)))) == 3
    assert len(calls) == 3 * 3


def test_a_resumed_iterator_fills_it() -> None:
    first, _ = counted(4)
    iterator = iterate(first)
    collect(iterator, 3)
    fresh, calls = counted(4)
    resumed = iterate(fresh)
    resumed.load_state_dict(iterator.state_dict())
    assert [int(x) for x in collect(resumed)] == [3]
    assert len(collect(iterate(fresh))) == 4
    assert calls == [0, 1, 2, 3]


def counted(size: int, path: Any = None) -> tuple[Dataset, list[int]]:
    calls: list[int] = []
    return Dataset.range(size).map(recorder(calls)).cache(path), calls


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.mark.parametrize("place", ["memory", "local", "remote"])
def test_one_whole_pass_is_enough(tmp_path: Path, place: str) -> None:
    path = {"memory": None, "local": tmp_path / "x", "remote": f"memory://{uuid.uuid4().hex}/x"}[place]
    dataset, calls = counted(5, path)
    assert [int(x) for x in dataset.take(2).repeat(2)] == [0, 1] * 2
    assert calls == [0, 1] * 2, "a pass that is left early is not kept"
    calls.clear()
    assert [int(x) for x in dataset.repeat(3)] == [0, 1, 2, 3, 4] * 3
    assert calls == [0, 1, 2, 3, 4]
    if path is not None:
        other, other_calls = counted(9, path)  # changes before the cache are not noticed
        assert [[int(x) for x in other] for _ in range(2)] == [[0, 1, 2, 3, 4]] * 2
        assert other_calls == []
    assert names(tmp_path) == (["x"] if place == "local" else [])


def test_a_pass_that_is_left_early_leaves_no_file(tmp_path: Path) -> None:
    dataset, _ = counted(5, tmp_path / "x")
    iterator = iter(dataset)
    next(iterator)
    assert len(names(tmp_path)) == 1  # the lock: elements of one block are not written yet
    del iterator
    assert names(tmp_path) == []
    for size in (0, 3):
        assert list(Dataset.range(size).cache(tmp_path / "x")) == [], "an empty input is kept"


def test_a_pass_with_an_error_is_not_kept(tmp_path: Path) -> None:
    dataset = Dataset.range(3).map(lambda x: 6 // int(x - 1)).cache(tmp_path / "x").repeat(2)
    items = collect(iterate(dataset))
    assert [item[0] if isinstance(item, tuple) else int(item) for item in items] == [-6, "ZeroDivisionError", 6] * 2
    assert names(tmp_path) == []


def test_a_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    dataset, _ = counted(5, tmp_path / "x")
    first = iter(dataset)
    assert int(next(first)) == 0
    items = collect(iterate(dataset))
    assert [kind for kind, _ in items] == ["FailedPreconditionError"]  # and then the end
    assert f"process {os.getpid()} on " in items[0][1]
    assert [int(x) for x in first] == [1, 2, 3, 4]
    assert len(collect(iterate(dataset))) == 5


def test_something_else_is_there(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("precious")
    with pytest.raises(FailedPreconditionError, match="does not exist yet"):
        list(counted(5, tmp_path / "x")[0])
    assert (tmp_path / "x").read_text() == "precious"
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("filled", ["before", "between", "never"])
def test_resuming_at_every_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: str) -> None:
    monkeypatch.setattr(write, "_CHUNK_ROWS", 3)
    for done in range(9):
        dataset, _ = counted(8, tmp_path / str(done))
        if filled == "before":
            collect(iterate(dataset))
        iterator = iterate(dataset)
        collect(iterator, done)
        state = json.loads(json.dumps(iterator.state_dict()))
        iterator.close()
        fresh, calls = counted(8, tmp_path / str(done))
        if filled == "between":
            collect(iterate(fresh))
            calls.clear()
        resumed = iterate(fresh)
        resumed.load_state_dict(state)
        assert collect(resumed) == list(range(done, 8))
        assert calls == (list(range(8)) if filled == "never" else [])
        assert len(collect(iterate(counted(0, tmp_path / str(done))[0]))) == 8


def test_a_state_of_other_elements_is_refused(tmp_path: Path) -> None:
    def shuffled(path: Path, seed: int) -> Dataset:
        return Dataset.range(30).shuffle(30).cache(path).with_options(Options(seed=seed))

    whole = collect(iterate(shuffled(tmp_path / "x", 1)))
    first = iterate(shuffled(tmp_path / "y", 1))
    assert same(collect(first, 4), whole[:4])
    state = first.state_dict()
    first.close()
    collect(iterate(shuffled(tmp_path / "y", 2)))
    resumed = iterate(shuffled(tmp_path / "y", 1))
    resumed.load_state_dict(state)
    assert same(collect(resumed), whole[4:])  # its own elements, made again

    reading = iterate(shuffled(tmp_path / "y", 3))
    collect(reading, 4)
    state = reading.state_dict()
    reading.close()
    for file in (tmp_path / "y").iterdir():
        file.unlink()
    (tmp_path / "y").rmdir()
    resumed = iterate(shuffled(tmp_path / "y", 3))
    resumed.load_state_dict(state)
    with pytest.raises(FailedPreconditionError, match="those that the state was saved with, but in"):
        next(resumed)


CRASH = """
import sys
from raydist.dataset import Dataset
from raydist.pipelines.stored import write
write._CHUNK_ROWS = 10
for x in Dataset.range(100).batch(1).unbatch().cache(sys.argv[1]).as_numpy_iterator():
    if int(x) == 50:
        print("there", flush=True)
        sys.stdin.readline()
"""


def test_a_writer_that_is_killed_leaves_nothing_that_counts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CRASH, str(tmp_path / "x")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "there\n"
            dataset, calls = counted(7, tmp_path / "x")
            with pytest.raises(FailedPreconditionError, match=f"process {writer.pid} on .* does"):
                next(iter(dataset))
            assert len(names(tmp_path)) == 2
        finally:
            writer.send_signal(signal.SIGKILL)
    assert [int(x) for x in dataset.repeat(2)] == [*range(7)] * 2
    assert calls == [*range(7)]
    assert names(tmp_path) == ["x"]


def test_damage_is_found(tmp_path: Path) -> None:
    dataset, calls = counted(5, tmp_path / "x")
    list(dataset)
    (file,) = (tmp_path / "x").glob("part-*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 8
    file.write_bytes(content)
    with pytest.raises(DataLossError, match="checksum"):
        list(dataset)
    (tmp_path / "x" / "manifest.json").write_text("{}")
    assert [kind for kind, _ in collect(iterate(dataset))] == ["DataLossError"]
    assert len(calls) == 5


def test_a_full_disk_ends_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "_CHUNK_ROWS", 2)
    monkeypatch.setattr(ChunkWriter, "write", full)
    items = collect(iterate(counted(5, tmp_path / "x")[0]))
    assert items[-1][0] == "OSError"
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", [None, "x"])
def test_a_user_cannot_change_what_is_kept(tmp_path: Path, name: str | None) -> None:
    dataset = Dataset.range(3).map(lambda x: np.full(2, x)).cache(name and tmp_path / name)
    for _ in range(3):
        for number, element in enumerate(dataset):
            assert element.tolist() == [number, number]
            element.fill_(7)


def snapshots(path: Any, **arguments: Any) -> tuple[Dataset, list[int]]:
    calls: list[int] = []
    return Dataset.range(6).map(recorder(calls)).snapshot(path, **arguments), calls


def alternately(shards: Dataset) -> Dataset:
    return shards.interleave(lambda shard: shard, cycle_length=9)


def test_the_first_epoch_writes_and_the_others_read(tmp_path: Path) -> None:
    for compression, suffix in (("AUTO", ".lz4"), (None, ".arrows"), ("GZIP", ".gz")):
        dataset, calls = snapshots(tmp_path / suffix, compression=compression)
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
    remote, calls = snapshots(f"memory://{uuid.uuid4().hex}/x", shard_func=lambda x: x % 2)
    assert [[int(x) for x in remote] for _ in range(2)] == [[0, 2, 4, 1, 3, 5]] * 2
    assert len(calls) == 6
    dataset, calls = snapshots(tmp_path, shard_func=lambda x: x // 2, reader_func=alternately)
    assert [[int(x) for x in dataset] for _ in range(2)] == [[0, 2, 4, 1, 3, 5]] * 2
    lively, _ = snapshots(tmp_path, reader_func=lambda shards: shards.flat_map(lambda shard: shard.shuffle(6)))
    epochs = [[int(x) for x in lively] for _ in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 4
    assert len(calls) == 6


def test_a_second_iterator_passes_by_while_the_first_writes(tmp_path: Path) -> None:
    dataset, calls = snapshots(tmp_path)
    first, second = iter(dataset), iter(dataset)
    assert [[int(x) for x in pair] for pair in zip(first, second, strict=True)] == [[x, x] for x in range(6)]
    assert len(list(dataset)) == 6
    assert len(calls) == 12


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
    assert collect(iterate(snapshots(tmp_path, shard_func=lambda x: 0.5)[0]))[0][0] == "SpecError"
    assert [entry for entry in tmp_path.rglob("*") if entry.is_file()] == []
    no_dataset, _ = snapshots(tmp_path, reader_func=len)
    with pytest.raises(TypeError):
        list(no_dataset)
    with pytest.raises(InvalidArgumentError, match="compression must be None or one of"):
        snapshots(tmp_path, compression="auto")
    with pytest.raises(InvalidArgumentError, match="shard_func must be a function or None, got 3"):
        snapshots(tmp_path, shard_func=3)
