"""tf.data, in the consumer's process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tensorflow as tf

from benchmarks.pipelines.data import COLUMNS, CROP, FILTER_COLUMN, MEAN, STD, THRESHOLD
from benchmarks.pipelines.memory import peak_over_idle
from benchmarks.pipelines.scene import MakePass, Pass, Scene

AUTOTUNE = tf.data.AUTOTUNE


def shared(source: Any, scene: Scene) -> Any:
    """The part of a source that one worker of a service reads; all of it without workers."""
    if scene.num_workers == 0:
        return source
    hint = tf.data.experimental.SHARD_HINT
    return source.shard(hint, hint)


def numbers(scene: Scene) -> Any:
    return shared(tf.data.Dataset.range(scene.rows), scene)


def reading(dataset: Any) -> Pass:
    """A pass over a batched dataset; the first component of each batch tells its rows."""
    dataset = dataset.prefetch(AUTOTUNE)
    return lambda: sum(int(tf.nest.flatten(batch)[0].shape[0]) for batch in dataset)


def element_map(scene: Scene) -> Any:
    return numbers(scene).map(lambda x: x * 2 + 1).batch(1024)


def batch_map(scene: Scene) -> Any:
    return numbers(scene).batch(1024).map(lambda x: x * 2 + 1, num_parallel_calls=AUTOTUNE)


def shuffle(scene: Scene) -> Any:
    return numbers(scene).shuffle(10_000).batch(1024)


def filter_numbers(scene: Scene) -> Any:
    return numbers(scene).filter(lambda x: x % 3 == 0).batch(500)


def window(scene: Scene) -> Any:
    windows = tf.data.Dataset.range(scene.rows).window(5, shift=1, drop_remainder=True)
    return windows.flat_map(lambda window: window.batch(5)).batch(64)


def interleave(scene: Scene) -> Any:
    length = scene.rows // 60
    return (
        tf.data.Dataset.range(60)
        .interleave(lambda i: tf.data.Dataset.range(i * length, (i + 1) * length), cycle_length=8, block_length=4)
        .batch(256)
    )


def mnist(scene: Scene) -> Any:
    images = np.load(scene.folder / "mnist" / "images.npy")[: scene.rows]
    labels = np.load(scene.folder / "mnist" / "labels.npy")[: scene.rows]
    return shared(tf.data.Dataset.from_tensor_slices((images, labels)), scene).shuffle(10_000)


def scaled(image: Any, label: Any) -> Any:
    return tf.cast(image, tf.float32) / 255.0, label


def mnist_element_map(scene: Scene) -> Any:
    return mnist(scene).map(scaled, num_parallel_calls=AUTOTUNE).batch(128)


def mnist_batch_map(scene: Scene) -> Any:
    return mnist(scene).batch(128).map(scaled, num_parallel_calls=AUTOTUNE)


def parsed(records: Any) -> Any:
    features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    rows = tf.io.parse_example(records, features)
    return tf.reshape(tf.io.decode_raw(rows["image"], tf.uint8), [-1, 28, 28]), rows["label"]


def mnist_tfrecords(scene: Scene) -> Any:
    files = shared(tf.data.Dataset.list_files(str(scene.folder / "mnist_tfrecords" / "*.tfrecord"), seed=1), scene)
    records = files.interleave(tf.data.TFRecordDataset, cycle_length=8, num_parallel_calls=AUTOTUNE)
    return records.shuffle(2_000).batch(128).map(parsed, num_parallel_calls=AUTOTUNE)


def augmented(path: Any) -> Any:
    """Only the part of the file that the crop needs is decoded."""
    data = tf.io.read_file(path)
    shape = tf.io.extract_jpeg_shape(data)
    top = tf.random.uniform([], 0, shape[0] - CROP + 1, tf.int32)
    left = tf.random.uniform([], 0, shape[1] - CROP + 1, tf.int32)
    image = tf.io.decode_and_crop_jpeg(data, tf.stack([top, left, CROP, CROP]), channels=3)
    image = tf.image.random_flip_left_right(image)
    return (tf.cast(image, tf.float32) / 255.0 - MEAN) / STD


def jpeg(scene: Scene) -> Any:
    files = tf.data.Dataset.list_files(str(scene.folder / "jpegs" / "*.jpg"), seed=1).take(scene.rows)
    return shared(files, scene).map(augmented, num_parallel_calls=AUTOTUNE).batch(32)


def parquet(scene: Scene) -> Any:
    """TensorFlow reads no Parquet: pyarrow gives filtered row groups, which are cut into rows and shuffled."""
    path = scene.folder / "parquet" / "rows.parquet"

    def row_groups() -> Any:
        file = pq.ParquetFile(path)
        for index in range(file.num_row_groups):
            table = file.read_row_group(index, columns=list(COLUMNS))
            table = table.filter(pc.field(FILTER_COLUMN) > THRESHOLD)
            yield {name: table[name].to_numpy() for name in COLUMNS}

    signature = {name: tf.TensorSpec([None], tf.float32) for name in COLUMNS}
    rows = tf.data.Dataset.from_generator(row_groups, output_signature=signature).unbatch()
    return rows.shuffle(10_000).batch(4096)


def memory(scene: Scene) -> Pass:
    blocks = tf.data.Dataset.range(scene.rows // 256).map(lambda i: tf.fill([256, 1024], tf.cast(i, tf.float32)))
    dataset = blocks.unbatch().shuffle(10_000).batch(256)
    return lambda: peak_over_idle(reading(dataset))


DATASETS: Mapping[str, Callable[[Scene], Any]] = {
    "element_map": element_map,
    "batch_map": batch_map,
    "shuffle": shuffle,
    "filter": filter_numbers,
    "window": window,
    "interleave": interleave,
    "mnist_element_map": mnist_element_map,
    "mnist_batch_map": mnist_batch_map,
    "mnist_input_workers": mnist_element_map,
    "mnist_tfrecords": mnist_tfrecords,
    "jpeg": jpeg,
    "jpeg_input_workers": jpeg,
    "parquet": parquet,
}


def _read(make: Callable[[Scene], Any]) -> MakePass:
    return lambda scene: reading(make(scene))


PASSES: Mapping[str, MakePass] = {
    **{name: _read(make) for name, make in DATASETS.items()},
    "memory": memory,
}
