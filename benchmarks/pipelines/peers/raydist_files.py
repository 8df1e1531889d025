"""raydist: files of records and columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import raydist as rd
from benchmarks.pipelines.data import COLUMNS, FILTER_COLUMN, THRESHOLD
from benchmarks.pipelines.peers.raydist_passes import placed, reading
from benchmarks.pipelines.scene import MakePass, Pass, Scene


def parsed(records: Any) -> Any:
    features = {"image": rd.FixedLenFeature((), bytes), "label": rd.FixedLenFeature((), np.int64)}
    rows = rd.parse_example(records, features)
    pixels = np.frombuffer(b"".join(rows["image"]), np.uint8)
    return pixels.reshape(-1, 28, 28), rows["label"]


def mnist_tfrecords(scene: Scene) -> Pass:
    files = rd.Dataset.list_files(str(scene.folder / "mnist_tfrecords" / "*.tfrecord"))
    records = files.interleave(rd.TFRecordDataset, cycle_length=8)
    batches = records.shuffle(2_000).batch(128).map(parsed, scene.num_calls)
    return reading(placed(batches, scene))


def parquet(scene: Scene) -> Pass:
    path = str(scene.folder / "parquet" / "rows.parquet")
    rows = rd.Dataset.from_parquet(path, columns=list(COLUMNS), filters=[(FILTER_COLUMN, ">", THRESHOLD)])
    return reading(placed(rows.shuffle(10_000).batch(4096), scene))


PASSES: Mapping[str, MakePass] = {"mnist_tfrecords": mnist_tfrecords, "parquet": parquet}
