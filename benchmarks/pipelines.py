"""Input pipelines in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import raydist as rd
from benchmarks.measuring import Throughput

BATCH = 1024


def pass_over(dataset: rd.Dataset, size: Callable[[Any], int] = len) -> Callable[[], int]:
    """A function that reads all of a batched dataset and counts rows."""
    return lambda: sum(size(batch) for batch in dataset)


def first_size(batch: tuple[Any, ...]) -> int:
    return len(batch[0])


def element_map(num_examples: int, folder: Path) -> Callable[[], int]:
    return pass_over(rd.Dataset.range(num_examples).map(lambda x: x * 2 + 1).batch(BATCH))


def batch_map(num_examples: int, folder: Path) -> Callable[[], int]:
    return pass_over(rd.Dataset.range(num_examples).batch(BATCH).map(lambda x: x * 2 + 1))


def shuffled(num_examples: int, folder: Path) -> Callable[[], int]:
    return pass_over(rd.Dataset.range(num_examples).shuffle(10_000, seed=1).batch(BATCH))


def images(num_examples: int, folder: Path) -> Callable[[], int]:
    pixels = np.random.default_rng(0).integers(0, 256, (num_examples, 28, 28), dtype=np.uint8)
    labels = np.arange(num_examples) % 10
    rows = rd.Dataset.from_tensor_slices((pixels, labels)).shuffle(10_000, seed=1)
    return pass_over(rows.map(lambda x, y: (x.astype(np.float32) / 255, y)).batch(128), first_size)


def records(num_examples: int, folder: Path) -> Callable[[], int]:
    """Framed records of 100 bytes: reading, checksums, shuffle and batch."""
    path = folder / "records.tfrecord"
    with rd.TFRecordWriter(str(path)) as writer:
        for index in range(num_examples):
            writer.write(index.to_bytes(100, "little"))
    return pass_over(rd.TFRecordDataset(str(path)).shuffle(10_000, seed=1).batch(128))


BENCHMARKS = (
    Throughput("pipeline: range.map(x*2+1).batch(1024), a Python call per element", 500_000, element_map),
    Throughput("pipeline: range.batch(1024).map(x*2+1)", 20_000_000, batch_map),
    Throughput("pipeline: range.shuffle(10,000).batch(1024)", 5_000_000, shuffled),
    Throughput("pipeline: 28x28 images, shuffle(10,000), map(/255), batch(128)", 60_000, images),
    Throughput("pipeline: TFRecords of 100 bytes, shuffle(10,000), batch(128)", 200_000, records),
)
