"""Pipelines whose fingerprints and states an earlier version wrote down: those in the files must stay here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import raydist as rd
from raydist import TensorSpec, VarLenFeature

FEATURES: dict[str, Any] = {
    "label": rd.FixedLenFeature((), "int64", 3),
    "ids": rd.VarLenFeature("int64"),
    "words": rd.RaggedFeature("bytes"),
    "pairs": rd.SparseFeature("index", "value", "float32", 10),
    "steps": rd.FixedLenSequenceFeature((), "int64", allow_missing=True),
}


def negative(x: np.int64) -> np.int64:
    return -x


def rows_of(x: np.int64) -> rd.Dataset:
    return rd.Dataset.range(int(x)).map(negative)


def reduced(key: np.int64, window: rd.Dataset) -> rd.Dataset:
    return window.batch(10)


def counted(limit: int) -> range:
    return range(limit)


def rows() -> NDArray[np.float64]:
    return np.arange(40.0).reshape(20, 2)


GRAPHS: dict[str, Callable[[], rd.Dataset]] = {
    "range": lambda: rd.Dataset.range(20),
    "slices": lambda: rd.Dataset.from_tensor_slices({"a": rows(), "b": list("abcdefghijklmnopqrst")}),
    "tensors": lambda: rd.Dataset.from_tensors((1, b"two", 3.0)),
    "generator": lambda: rd.Dataset.from_generator(counted, output_signature=rd.TensorSpec((), "int64"), args=(9,)),
    "counter": lambda: rd.Dataset.counter(3, 2).take(9),
    "random": lambda: rd.Dataset.random(seed=4).take(9),
    "map": lambda: rd.Dataset.range(20).map(negative),
    "map on threads": lambda: rd.Dataset.range(20).map(negative, num_parallel_calls=2),
    "map of a ufunc": lambda: rd.Dataset.range(20).map(np.negative).map(np.abs),
    "map_batches": lambda: rd.Dataset.range(20).map_batches(negative, batch_size=3),
    "filter": lambda: rd.Dataset.range(20).filter(bool),
    "flat_map": lambda: rd.Dataset.range(5).flat_map(rows_of),
    "interleave": lambda: rd.Dataset.range(6).interleave(rows_of, cycle_length=2, block_length=2),
    "interleave on threads": lambda: rd.Dataset.range(6).interleave(rows_of, cycle_length=2, num_parallel_calls=2),
    "batch": lambda: rd.Dataset.range(20).batch(3, drop_remainder=True),
    "padded_batch": lambda: rd.Dataset.from_tensor_slices(rows()).padded_batch(3, [4]),
    "unbatch": lambda: rd.Dataset.range(20).batch(3).unbatch(),
    "rebatch": lambda: rd.Dataset.range(20).batch(3).rebatch([1, 2]),
    "shuffle": lambda: rd.Dataset.range(20).shuffle(5, seed=1),
    "shuffle and repeat": lambda: rd.Dataset.range(20).shuffle(20, seed=1).repeat(2),
    "global_shuffle": lambda: rd.Dataset.range(20).global_shuffle(seed=2),
    "take and skip": lambda: rd.Dataset.range(20).skip(2).take(9),
    "take_while": lambda: rd.Dataset.range(20).map(negative).take_while(np.isfinite),
    "shard": lambda: rd.Dataset.range(20).map(negative).shard(3, 1),
    "prefetch": lambda: rd.Dataset.range(20).map(negative).prefetch(3),
    "cache": lambda: rd.Dataset.range(20).map(negative).cache().repeat(2),
    "concatenate": lambda: rd.Dataset.range(4).concatenate(rd.Dataset.range(5)),
    "zip": lambda: rd.Dataset.zip({"a": rd.Dataset.range(9), "b": rd.Dataset.range(9).map(negative)}),
    "enumerate": lambda: rd.Dataset.from_tensor_slices(rows()).enumerate(5),
    "window": lambda: rd.Dataset.range(9).window(3, 2).flat_map(identity),
    "scan": lambda: rd.Dataset.range(9).scan(0, divmod_sum),
    "unique": lambda: rd.Dataset.range(9).map(halved).unique(),
    "group_by_window": lambda: rd.Dataset.range(20).group_by_window(halved, reduced, window_size=4),
    "bucket": lambda: rd.Dataset.from_tensor_slices(rows()).bucket_by_sequence_length(len, [2, 4], [2, 2, 2]),
    "rejection_resample": lambda: rd.Dataset.range(40).rejection_resample(parity, [0.5, 0.5], seed=3),
    "ignore_errors": lambda: rd.Dataset.range(20).map(inverse).ignore_errors(),
    "assert_cardinality": lambda: rd.Dataset.range(20).filter(bool).assert_cardinality(19),
    "sample": lambda: rd.Dataset.sample_from_datasets([rd.Dataset.range(9), rd.Dataset.range(9)], [0.5, 0.5], seed=6),
    "choose": lambda: rd.Dataset.choose_from_datasets(
        [rd.Dataset.range(9), rd.Dataset.range(9, 18)], rd.Dataset.range(10).map(parity)
    ),
    "options": lambda: rd.Dataset.range(20).with_options(rd.Options(seed=5)).shuffle(4).map(drawn),
    "a training input": lambda: (
        rd.Dataset.from_tensor_slices((rows(), np.arange(20)))
        .shuffle(8, seed=2)
        .repeat(2)
        .map(scaled)
        .batch(6)
        .prefetch(2)
    ),
}

# These name files that are not there: they have fingerprints alone.
OF_FILES: dict[str, Callable[[], rd.Dataset]] = {
    "tfrecords": lambda: rd.TFRecordDataset(["/data/a.tfrecords", "/data/b.tfrecords"], "GZIP"),
    "tfrecords on threads": lambda: rd.TFRecordDataset("/data/a.tfrecords", num_parallel_reads=2),
    "text lines": lambda: rd.TextLineDataset("/data/a.txt"),
    "fixed-length records": lambda: rd.FixedLengthRecordDataset("/data/a.bin", 8, header_bytes=2, footer_bytes=1),
    "records of names": lambda: rd.TFRecordDataset(rd.Dataset.from_tensor_slices(["/data/a", "/data/b"])),
    "a class of ours": lambda: rd.TFRecordDataset("/data/a.tfrecords").map(parsed),
    "cache in a file": lambda: rd.Dataset.range(20).map(negative).cache("/data/cache"),
    "snapshot": lambda: rd.Dataset.range(20).map(negative).snapshot("/data/snapshot"),
    "snapshot in shards": lambda: rd.Dataset.range(20).snapshot("/data/snapshot", None, in_turn, parity),
}


def divmod_sum(total: np.int64, x: np.int64) -> tuple[np.int64, np.int64]:
    return total + x, total


def halved(x: np.int64) -> np.int64:
    return x // 2


def parity(x: np.int64) -> np.int64:
    return x % 2


def inverse(x: np.int64) -> float:
    return 1 / int(x)


def drawn(x: np.int64, *, rng: np.random.Generator) -> float:
    return float(x) + float(rng.random())


def scaled(x: NDArray[np.float64], y: np.int64) -> tuple[NDArray[np.float32], np.int64]:
    return (x / 2).astype(np.float32), y


def parsed(serialized: bytes) -> list[object]:
    return [TensorSpec, VarLenFeature, FEATURES]


def in_turn(shards: rd.Dataset) -> rd.Dataset:
    return shards.interleave(identity)


def identity(shard: rd.Dataset) -> rd.Dataset:
    return shard
