"""Iterators whose states are tampered with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import raydist as rd
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.joined_states import join_workers, split_workers
from raydist.pipelines.run.steps import WorkerBatches, element_views

__all__ = ["make_pipelines"]

Pipelines = dict[str, Callable[[], Any]]
"""For each name: what gives a fresh iterator."""


def make_pipelines(folder: Path) -> Pipelines:
    """Pipelines whose states have parts of every kind. Writes some files into `folder`."""
    datasets = {**_plain(), **_files(folder), **_random()}
    iterators: Pipelines = {name: dataset.as_numpy_iterator for name, dataset in datasets.items()}
    strategy = rd.OneDeviceStrategy("cpu")
    for name in ("batch", "shuffle repeat", "interleave"):
        view = strategy.distribute_dataset(datasets[name].batch(2))
        iterators[f"distributed {name}"] = lambda view=view: iter(view)  # type: ignore[misc]  # binds the view
    iterators["several workers"] = lambda: SeveralWorkers(datasets["shuffle"].batch(5))
    return iterators


class SeveralWorkers:
    """The step sources of two workers that read the same, as one iterator."""

    def __init__(self, dataset: rd.Dataset) -> None:
        self._sources = [
            WorkerBatches(
                DatasetIterator(dataset._op, options=rd.Options(), seed=1, epoch=0, convert=element_views),
                num_replicas=1,
                num_pieces=2,
                rule="balanced",
            )
            for _ in range(2)
        ]

    def __next__(self) -> Any:
        return [source.next_step()[0].columns[0] for source in self._sources]

    def state_dict(self) -> Any:
        return join_workers([source.state_dict() for source in self._sources], self._sources[0].step)

    def load_state_dict(self, state: Any) -> None:
        for source, its_state in zip(self._sources, split_workers(state, 2, 1), strict=True):
            source.load_state_dict(its_state)

    def close(self) -> None:
        for source in self._sources:
            source.close()


def _plain() -> dict[str, rd.Dataset]:
    numbers = rd.Dataset.range(40)
    even: Any = lambda x: x % 2 == 0  # noqa: E731
    return {
        "range": numbers,
        "memory": rd.Dataset.from_tensor_slices(np.arange(30)),
        "generator": rd.Dataset.from_generator(lambda: iter(range(20)), output_signature=rd.TensorSpec((), np.int64)),
        "batch": numbers.batch(4),
        "padded": numbers.padded_batch(3),
        "rebatch": numbers.batch(4).rebatch([3, 2]),
        "unbatch": numbers.batch(5).unbatch(),
        "map": numbers.map(lambda x: x + 1, num_parallel_calls=2).prefetch(3),
        "unordered": numbers.map(lambda x: x + 1, num_parallel_calls=2, deterministic=False),
        "filter take skip": numbers.filter(even).skip(2).take(15),
        "take while": numbers.take_while(lambda x: x < 30),
        "repeat": rd.Dataset.range(5).repeat(4),
        "window": numbers.window(5, shift=2).flat_map(lambda window: window),
        "interleave": rd.Dataset.range(6).interleave(
            lambda x: rd.Dataset.range(5).map(lambda y: x * 10 + y), cycle_length=3, block_length=2
        ),
        "parallel interleave": rd.Dataset.range(6).interleave(
            lambda x: rd.Dataset.range(5), cycle_length=3, num_parallel_calls=2
        ),
        "flat_map": rd.Dataset.range(6).flat_map(lambda x: rd.Dataset.range(x)),
        "concatenate": numbers.concatenate(rd.Dataset.range(10)),
        "zip": rd.Dataset.zip(numbers, rd.Dataset.range(30).batch(1)),
        "enumerate scan": numbers.enumerate().scan(0, lambda state, pair: (state + pair[1], state)),
        "shard": numbers.shard(3, 1),
        "unique": numbers.map(lambda x: x // 2).unique(),
        "ignore errors": numbers.map(lambda x: 1 // int(x % 7)).ignore_errors(),
        "assert": numbers.apply(lambda ds: ds.assert_cardinality(40)),
        "cache": numbers.cache(),
        "map batches": numbers.map_batches(lambda x: x * 2, 8),
    }


def _random() -> dict[str, rd.Dataset]:
    numbers = rd.Dataset.range(40)
    pair = [rd.Dataset.range(20), rd.Dataset.range(100, 120)]
    return {
        "shuffle": numbers.shuffle(10, seed=3),
        "shuffle repeat": rd.Dataset.range(9).shuffle(4).repeat(3),
        "global shuffle": numbers.global_shuffle(seed=4),
        "random": rd.Dataset.random(seed=5).take(30),
        "counter": rd.Dataset.counter().take(30),
        "sample": rd.Dataset.sample_from_datasets(pair, [0.5, 0.5], seed=1),
        "choose": rd.Dataset.choose_from_datasets(pair, rd.Dataset.range(30).map(lambda x: x % 2)),
        "groups": numbers.group_by_window(lambda x: x % 3, lambda key, window: window.batch(4), window_size=4),
        "buckets": numbers.map(lambda x: np.zeros(int(x) % 9 + 1)).bucket_by_sequence_length(len, [3, 6], [2, 2, 2]),
        "resample": numbers.rejection_resample(lambda x: int(x % 2), [0.5, 0.5], [0.5, 0.5], seed=1),
    }


def _files(folder: Path) -> dict[str, rd.Dataset]:
    paths = []
    for number in range(3):
        paths.append(str(folder / f"{number}.tfrecord"))
        with rd.TFRecordWriter(paths[-1]) as writer:
            for record in range(8):
                writer.write(bytes([number, record]))
    (folder / "a.jsonl").write_text('{"a": 1}\n' * 20)
    np.save(folder / "a.npy", np.arange(20))
    rd.Dataset.range(20).save(str(folder / "saved"))
    return {
        "records": rd.TFRecordDataset(paths),
        "records in turn": rd.TFRecordDataset(paths, num_parallel_reads=2),
        "json": rd.Dataset.from_json(str(folder / "a.jsonl")),
        "numpy": rd.Dataset.from_numpy(str(folder / "a.npy")),
        "load": rd.Dataset.load(str(folder / "saved")),
        "stored cache": rd.Dataset.range(20).cache(str(folder / "cache")),
        "snapshot": rd.Dataset.range(20).snapshot(str(folder / "snapshot")),
    }
