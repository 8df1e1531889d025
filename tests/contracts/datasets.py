"""Datasets that together hold every operation, alone and in company: what `check_op` is run on."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv
from pyarrow import parquet as pq
from torch.utils.data import DataLoader, IterableDataset

import raydist as rd
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.elements.spec import TensorSpec
from tests.pipelines.formats.test_tar_samples import write_tar
from tests.pipelines.sources.saved_hub_dataset import save_to_disk

__all__ = ["DATASETS"]

FILES = tempfile.TemporaryDirectory()
TABLE = pa.table({"x": range(9), "y": [f"row {x}" for x in range(9)]})
DATES = pa.table({"d": pa.array([5, None, 7, 8], pa.date32()), "t": pa.array([None, 2, 3, 4], pa.duration("ms"))})
TAR = [("a.x", b"1"), ("a.y", b""), ("b.x", b"2"), ("b.y", b"3")]
INVERSE: Dataset = Dataset.from_tensor_slices([1.0, 2.0, 0.0, 4.0, 5.0, 0.0, 0.0]).map(lambda x: 1 / float(x))


def noisy(x: np.int64, *, rng: np.random.Generator) -> float:
    return float(x) + float(rng.random())


DATASETS: dict[str, Callable[[], Dataset]] = {
    "range": lambda: Dataset.range(7),
    "range with step": lambda: Dataset.range(9, -3, -2, output_type="int32"),
    "from_tensors": lambda: Dataset.from_tensors({"a": [1, 2], "b": "text"}),
    "from_tensor_slices": lambda: Dataset.from_tensor_slices((np.arange(12.0).reshape(4, 3), [b"a", b"b", b"c", b"d"])),
    "from_tensor_slices with None": lambda: Dataset.from_tensor_slices(
        {"x": [1, 2, 3], "y": None, "z": (None, ["a"] * 3)}
    ),
    "batch with None": lambda: Dataset.range(9).map(lambda x: (None, (x, None))).shuffle(4).batch(2),
    "map": lambda: Dataset.range(9).map(lambda x: (x * 2, float(x))),
    "map of tuples": lambda: (
        Dataset.range(6).map(lambda x: (x, x + 1)).map(lambda a, b: {"sum": a + b, "text": str(a)})
    ),
    "map with rng behind a filter": lambda: Dataset.range(20).filter(lambda x: x % 3 != 0).map(noisy),
    "map on threads": lambda: Dataset.range(20).map(noisy, num_parallel_calls=3),
    "map in order": lambda: Dataset.range(9).map(noisy, num_parallel_calls=1).map(noisy),
    "map with errors": lambda: INVERSE,
    "map with large results": lambda: INVERSE.repeat(3).map(lambda x: np.full(1 << 13, x)),
    "map with large results on threads": lambda: INVERSE.repeat(2).map(
        lambda x: (np.full(1 << 14, x), x), num_parallel_calls=2
    ),
    "from_torch of a loader": lambda: Dataset.from_torch(_loader()).repeat(2),
    "from_torch of a loader of a stream": lambda: Dataset.from_torch(DataLoader(Iterable(), batch_size=4)),
    "filter": lambda: Dataset.range(20).filter(lambda x: x % 3 == 0),
    "filter of errors": lambda: INVERSE.filter(lambda x: x < 0.9).map(lambda x: x + 1),
    "batch": lambda: Dataset.range(10).batch(3),
    "batch of errors": lambda: INVERSE.batch(2),
    "batch of bytes": lambda: Dataset.from_tensor_slices([b"a", b"bc", b"def"]).batch(2),
    "batch of batches": lambda: Dataset.range(11).batch(2).batch(2, drop_remainder=True),
    "unbatch": lambda: Dataset.range(10).batch(3).unbatch(),
    "map_batches": lambda: Dataset.range(10).map_batches(lambda x: (x, x * 0.5), batch_size=4),
    "shuffle": lambda: Dataset.range(20).shuffle(5),
    "shuffle with seed": lambda: Dataset.range(20).shuffle(5, seed=3, reshuffle_each_iteration=False),
    "shuffle of all": lambda: Dataset.range(10).shuffle(UNKNOWN_CARDINALITY),
    "shuffle of rows": lambda: Dataset.from_tensor_slices(np.arange(30).reshape(10, 3)).shuffle(4),
    "shuffle of a map": lambda: Dataset.range(20).map(lambda x: (x, str(x))).shuffle(7),
    "shuffle of errors": lambda: INVERSE.shuffle(3),
    "shuffle of ragged rows": lambda: Dataset.range(9).map(lambda x: np.arange(x), output_spec=_ints()).shuffle(4),
    "shuffle and repeat": lambda: Dataset.range(5).shuffle(3).repeat(3),
    "repeat and shuffle": lambda: Dataset.range(5).repeat(3).shuffle(4),
    "repeat for ever": lambda: Dataset.range(3).shuffle(3).repeat(),
    "repeat of nothing": lambda: Dataset.range(3).filter(lambda x: False).repeat(2),
    "repeat of errors": lambda: INVERSE.repeat(2),
    "repeat of repeats": lambda: Dataset.range(3).shuffle(3).repeat(2).map(noisy).repeat(2),
    "take": lambda: Dataset.range(10).take(4),
    "take of errors": lambda: INVERSE.take(3),
    "skip": lambda: Dataset.range(10).skip(4),
    "skip of all": lambda: Dataset.range(5).skip(-1),
    "skip of errors": lambda: INVERSE.skip(3),
    "prefetch": lambda: Dataset.range(20).map(noisy).prefetch(4),
    "prefetch of a shuffle": lambda: Dataset.range(20).shuffle(5).prefetch().batch(3).prefetch(1),
    "prefetch of errors": lambda: INVERSE.prefetch(2).map(lambda x: x),
    "zip": lambda: Dataset.zip(Dataset.range(7).shuffle(3), Dataset.range(5).map(noisy)),
    "zip of errors": lambda: Dataset.zip({"a": INVERSE, "b": Dataset.range(6)}),
    "with_options": lambda: Dataset.range(9).shuffle(9).with_options(Options(seed=5)).map(noisy),
    "apply": lambda: Dataset.range(9).apply(lambda ds: ds.shuffle(3)).apply(lambda ds: ds.batch(2)),
    "concatenate": lambda: Dataset.range(5).shuffle(3).concatenate(Dataset.range(7, 12).map(lambda x: x)),
    "concatenate of errors": lambda: INVERSE.concatenate(INVERSE.take(2)),
    "concatenate of nothing": lambda: Dataset.range(0).concatenate(Dataset.range(3)).concatenate(Dataset.range(0)),
    "enumerate": lambda: Dataset.range(9).filter(lambda x: x % 2 == 1).enumerate(start=4),
    "enumerate of errors": lambda: INVERSE.enumerate(),
    "take_while": lambda: Dataset.range(20).shuffle(4).take_while(lambda x: x < 12),
    "take_while of errors": lambda: INVERSE.take_while(lambda x: 1 / float(x - 0.5) > -4),
    "shard": lambda: Dataset.range(20).map(noisy).shard(3, 2).shard(2, 1),
    "shard of a source": lambda: Dataset.from_tensor_slices(np.arange(11)).shuffle(20).shard(2, 1),
    "shard of errors": lambda: INVERSE.shard(2, 0),
    "flat_map": lambda: Dataset.range(6).flat_map(lambda n: Dataset.range(n).map(noisy).shuffle(2)),
    "flat_map of errors": lambda: INVERSE.flat_map(lambda x: Dataset.from_tensors(x).repeat(int(4 * x))),
    "interleave": lambda: Dataset.range(6).shuffle(3).interleave(_rows_of, cycle_length=3, block_length=2),
    "interleave of long datasets": lambda: Dataset.range(3).interleave(lambda n: Dataset.range(n, 40), cycle_length=2),
    "interleave of errors": lambda: Dataset.range(4).interleave(lambda n: INVERSE.skip(6 // int(n - 1))),
    "interleave on threads": lambda: Dataset.range(6).interleave(_rows_of, 3, 2, num_parallel_calls=2),
    "interleave of interleaves": lambda: Dataset.range(3).interleave(lambda n: Dataset.range(3).interleave(_rows_of)),
    "interleave of many": lambda: Dataset.range(60).interleave(lambda n: Dataset.range(n, n + 2), cycle_length=50),
    "window": lambda: Dataset.range(9).shuffle(3).window(3, 1, 2).flat_map(lambda w: w.batch(3)),
    "window of pairs": lambda: (
        Dataset.range(7).map(lambda x: (x, str(x))).window(2, 3).flat_map(lambda *w: Dataset.zip(*w).batch(2))
    ),
    "window of errors": lambda: INVERSE.window(2, 1, 3).flat_map(lambda w: w.batch(2)),
    "long windows": lambda: Dataset.range(40).window(30, 2, drop_remainder=True).flat_map(lambda w: w.batch(30)),
    "scan": lambda: Dataset.range(9).shuffle(4).scan(0, lambda total, x: (total + x, (x, str(total)))),
    "scan of errors": lambda: INVERSE.scan(1.0, lambda total, x: (total + x, 1 / float(x - 0.5))),
    "unique": lambda: Dataset.random(seed=3).take(30).map(lambda x: x % 7).unique(),
    "unique of errors": lambda: INVERSE.map(lambda x: str(x)[:2]).unique(),
    "ignore_errors": lambda: INVERSE.shuffle(3).ignore_errors().batch(2),
    "assert_cardinality": lambda: Dataset.range(9).filter(lambda x: x % 2 == 0).assert_cardinality(5),
    "assert_cardinality of errors": lambda: INVERSE.assert_cardinality(7),
    "counter": lambda: Dataset.counter(start=5, step=-2, dtype="int32"),
    "random": lambda: Dataset.random(rerandomize_each_iteration=True),
    "padded_batch": lambda: Dataset.range(9).map(np.arange, output_spec=_ints()).enumerate().padded_batch(4),
    "padded_batch of errors": lambda: INVERSE.map(lambda x: np.full(int(4 * x), x)).padded_batch(2, [5], -1.0),
    "ragged_batch": lambda: Dataset.range(9).shuffle(4).map(np.arange).ragged_batch(4),
    "ragged_batch of errors": lambda: INVERSE.map(lambda x: np.full(int(4 * x), x)).ragged_batch(2),
    "batch with collate": lambda: Dataset.range(9).shuffle(4).batch(4, collate=list),
    "rebatch": lambda: Dataset.range(11).shuffle(4).batch(4).rebatch(3),
    "rebatch in turn": lambda: Dataset.range(8).map(lambda x: (x, x * 0.5)).batch(3).rebatch([2, 0, 1]),
    "rebatch of errors": lambda: INVERSE.batch(2).rebatch([1, 2], drop_remainder=True),
    "sample_from_datasets": lambda: Dataset.sample_from_datasets(
        [Dataset.range(9).shuffle(9), Dataset.range(50, 53), Dataset.range(90, 99)], [0.5, 0.3, 0.2]
    ),
    "sample_from_datasets for ever": lambda: Dataset.sample_from_datasets(
        [Dataset.range(3).repeat(), INVERSE.map(int)]
    ),
    "choose_from_datasets": lambda: Dataset.choose_from_datasets(
        [INVERSE, INVERSE.skip(1)], Dataset.random(seed=1).map(lambda x: x % 3).take(12), stop_on_empty_dataset=False
    ),
    "global_shuffle": lambda: Dataset.range(30).global_shuffle(),
    "global_shuffle of rows": lambda: (
        Dataset.from_tensor_slices((np.arange(20).reshape(10, 2), list("abcdefghij"))).global_shuffle(seed=2).repeat(2)
    ),
    "sample_by_weight": lambda: Dataset.range(6).sample_by_weight([1, 0, 2, 5, 1, 1], 20),
    "sample_by_weight without replacement": lambda: (
        Dataset.from_tensor_slices((np.arange(20).reshape(10, 2), list("abcdefghij")))
        .sample_by_weight(range(10), 7, replacement=False, seed=2)
        .repeat(2)
    ),
    "cache": lambda: Dataset.range(9).shuffle(4).map(noisy).cache().shuffle(3).repeat(2),
    "cache of errors": lambda: INVERSE.cache().repeat(2),
    "group_by_window": lambda: Dataset.range(20).shuffle(4).group_by_window(lambda x: x % 3, _shuffled, window_size=4),
    "group_by_window of errors": lambda: INVERSE.group_by_window(
        lambda x: int(4 * x) % 2, _shuffled, window_size_func=lambda key: key + 1
    ),
    "bucket_by_sequence_length": lambda: (
        Dataset.range(9)
        .shuffle(3)
        .map(np.arange, output_spec=_ints())
        .bucket_by_sequence_length(len, [3, 6], [3, 2, 1])
    ),
    "bucket_by_sequence_length of errors": lambda: INVERSE.map(
        lambda x: np.full(int(4 * x), x), output_spec=_floats()
    ).bucket_by_sequence_length(len, [2, 4], [2, 1, 1], padding_values=-1, pad_to_bucket_boundary=True),
    "rejection_resample": lambda: (
        Dataset.range(60).shuffle(5).rejection_resample(lambda x: int(x % 4 == 0), [0.5, 0.5], [0.75, 0.25])
    ),
    "rejection_resample with an estimate": lambda: (
        Dataset.range(60)
        .map(lambda x: (x, str(x)))
        .rejection_resample(lambda x, text: x % 4 // 2, [0.2, 0.8])
        .repeat(2)
    ),
    "rejection_resample of errors": lambda: INVERSE.rejection_resample(lambda x: 1 // int(2 * x), [0.3, 0.3, 0.4]),
    "rejection_resample of many classes": lambda: Dataset.range(40).rejection_resample(
        lambda x: x * 5 % 300, np.arange(300), seed=2
    ),
    "cache in a file": lambda: Dataset.range(9).shuffle(4).map(noisy).cache(f"{FILES.name}/cache").shuffle(3).repeat(2),
    "cache in a file that is not there yet": lambda: (
        Dataset.range(9).shuffle(4).map(noisy).cache(f"{FILES.name}/{uuid.uuid4().hex}").repeat(2)
    ),
    "cache in a file of errors": lambda: INVERSE.cache(f"{FILES.name}/{uuid.uuid4().hex}").repeat(2),
    "snapshot": lambda: Dataset.range(9).shuffle(4).map(noisy).snapshot(FILES.name).shuffle(3).repeat(2),
    "snapshot in shards": lambda: (
        Dataset.range(9)
        .map(noisy)
        .snapshot(f"{FILES.name}/{uuid.uuid4().hex}", None, _in_turns, lambda x: int(x) % 3)
        .repeat(2)
    ),
    "from_generator": lambda: Dataset.from_generator(
        lambda: ((x, str(x)) for x in range(7)), output_signature=(TensorSpec((), np.int64), TensorSpec((), str))
    ),
    "from_torch": lambda: Dataset.from_torch(Iterable()),
    "from_arrow": lambda: Dataset.from_arrow(TABLE).shuffle(3),
    "from_tar": lambda: Dataset.from_tar(
        [_written(f"{shard}.tar", lambda path: write_tar(Path(path), TAR)) for shard in range(3)], num_parallel_reads=2
    ).shuffle(3),
    "from_huggingface": lambda: Dataset.from_huggingface(
        _written("hub", lambda path: save_to_disk(Path(path), TABLE))
    ).shuffle(3),
    "from_arrow with dates and nulls": lambda: Dataset.from_arrow(DATES, null_masks=True).shuffle(3).batch(2),
    "from_parquet": lambda: Dataset.from_parquet(_written("rows.parquet", lambda path: pq.write_table(TABLE, path))),
    "from_csv": lambda: Dataset.from_csv(_written("rows.csv", lambda path: csv.write_csv(TABLE, path))),
    "from_numpy": lambda: Dataset.from_numpy(_written("rows.npy", lambda path: np.save(path, np.arange(14.0)))),
    "text lines": lambda: rd.TextLineDataset(_written("rows.csv", lambda path: csv.write_csv(TABLE, path))),
    "a training input": lambda: (
        Dataset.from_tensor_slices((np.arange(40).reshape(20, 2), np.arange(20)))
        .shuffle(8)
        .repeat(2)
        .map(lambda x, y: (x.astype(np.float32) / 2, y))
        .batch(6)
        .prefetch(2)
    ),
}


def _written(name: str, write: Callable[[str], object]) -> str:
    path = f"{FILES.name}/{name}"
    if not os.path.exists(path):
        write(path)
    return path


class Iterable(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def _loader() -> DataLoader[int]:
    rows: list[int] = [*range(10)]
    generator = torch.Generator().manual_seed(3)
    return DataLoader(rows, batch_size=4, shuffle=True, num_workers=1, generator=generator)  # type: ignore[arg-type]  # a list is a dataset to torch


def _rows_of(number: np.int64) -> Dataset:
    return Dataset.range(int(number)).map(lambda x: x + 10 * number)


def _in_turns(shards: Dataset) -> Dataset:
    return shards.interleave(lambda shard: shard.shuffle(2))


def _shuffled(key: np.int64, window: Dataset) -> Dataset:
    return window.shuffle(3).map(noisy)


def _floats() -> object:
    return TensorSpec((None,), np.float64)


def _ints() -> object:
    return TensorSpec((None,), np.int64)
