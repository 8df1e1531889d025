"""Data that workloads read, made once and kept in a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import raydist as rd
from benchmarks.pipelines.data import ALL_COLUMNS
from raydist.pipelines.tf_example.parse import example_class

Make = Callable[[Path, bool], None]
NUM_SHARDS = 8
ROW_GROUP = 250_000


def mnist_file() -> Path:
    return Path(os.environ.get("RAYDIST_TEST_DATA", "")) / "mnist10k.npz"


def images_are() -> str:
    """Which images the MNIST workloads read."""
    return "Images of MNIST" if mnist_file().is_file() else "Noise in the place of MNIST's images"


def mnist_images() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The 10,000 test images of MNIST if RAYDIST_TEST_DATA names a folder that has them, else noise of that size."""
    path = mnist_file()
    if path.is_file():
        with np.load(path) as arrays:
            return arrays["images"], arrays["labels"].astype(np.int64)
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (10_000, 28, 28), dtype=np.uint8), draw.integers(0, 10, 10_000)


def make_mnist(folder: Path, smoke: bool) -> None:
    images, labels = mnist_images()
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)


def make_mnist_tfrecords(folder: Path, smoke: bool) -> None:
    images, labels = mnist_images()
    count = 1_000 if smoke else len(images)
    for shard in range(NUM_SHARDS):
        with rd.TFRecordWriter(str(folder / f"{shard}.tfrecord")) as writer:
            for index in range(shard, count, NUM_SHARDS):
                writer.write(example_of(images[index], int(labels[index])))


def example_of(image: np.ndarray[Any, Any], label: int) -> bytes:
    message = example_class()()
    message.features.feature["image"].bytes_list.value.append(image.tobytes())
    message.features.feature["label"].int64_list.value.append(label)
    data: bytes = message.SerializeToString()
    return data


def make_jpegs(folder: Path, smoke: bool) -> None:
    import simplejpeg  # an extra of raydist: without it only these workloads are missing

    draw = np.random.default_rng(0)
    for index in range(32 if smoke else 400):
        data = simplejpeg.encode_jpeg(photograph(draw), quality=88, colorsubsampling="420")
        (folder / f"{index:03}.jpg").write_bytes(data)


def photograph(draw: np.random.Generator, height: int = 375, width: int = 500) -> np.ndarray[Any, Any]:
    """Noise at many scales, coarse ones strongest: compresses about as well as a photograph (40 KB)."""
    image = np.zeros((height, width, 3), np.float32)
    for cell in (125, 50, 20, 8, 3, 1):
        coarse = draw.normal(size=(height // cell + 1, width // cell + 1, 3)).astype(np.float32)
        image += coarse.repeat(cell, 0).repeat(cell, 1)[:height, :width] * (cell**0.6)
    low, high = image.min(), image.max()
    return np.ascontiguousarray((image - low) / (high - low) * 255).astype(np.uint8)


def make_parquet(folder: Path, smoke: bool) -> None:
    """20 columns of random float32, in row groups of 250,000; with page checksums."""
    draw = np.random.default_rng(0)
    schema = pa.schema([(name, pa.float32()) for name in ALL_COLUMNS])
    rows = 50_000 if smoke else 5_000_000
    with pq.ParquetWriter(folder / "rows.parquet", schema, write_page_checksum=True) as writer:
        for start in range(0, rows, ROW_GROUP):
            count = min(ROW_GROUP, rows - start)
            columns = [draw.random(count, dtype=np.float32) for _ in ALL_COLUMNS]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=ROW_GROUP)


MAKERS: Mapping[str, Make] = {
    "mnist": make_mnist,
    "mnist_tfrecords": make_mnist_tfrecords,
    "jpegs": make_jpegs,
    "parquet": make_parquet,
}


def ensure(name: str, root: Path, *, smoke: bool) -> None:
    """Make the data `name` in `root` unless it is there. A folder is complete or missing, never in between."""
    if (root / name).is_dir():
        return
    unfinished = root / f".{name}-{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    MAKERS[name](unfinished, smoke)
    unfinished.rename(root / name)
