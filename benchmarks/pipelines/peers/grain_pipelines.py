"""grain, in the consumer's process. Its shuffle is a permutation of all rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grain
import numpy as np

from benchmarks.pipelines.peers.pictures import augmented
from benchmarks.pipelines.scene import MakePass, Pass, Scene

INLINE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
THREADS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=64)


def first_leaf(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple) else batch


def reading(dataset: Any, options: Any = INLINE) -> Pass:
    stream = dataset.to_iter_dataset(options) if isinstance(dataset, grain.MapDataset) else dataset
    return lambda: sum(len(first_leaf(batch)) for batch in stream)


def numbers(scene: Scene) -> Any:
    return grain.MapDataset.range(scene.rows)


def element_map(scene: Scene) -> Pass:
    return reading(numbers(scene).map(lambda x: x * 2 + 1).batch(1024))


def batch_map(scene: Scene) -> Pass:
    return reading(numbers(scene).batch(1024).map(lambda x: x * 2 + 1))


def shuffle(scene: Scene) -> Pass:
    return reading(numbers(scene).shuffle(seed=1).batch(1024))


def filter_numbers(scene: Scene) -> Pass:
    kept = numbers(scene).to_iter_dataset(INLINE).filter(lambda x: x % 3 == 0)
    return reading(kept.batch(500, drop_remainder=False))


def mnist(scene: Scene) -> Any:
    images = np.load(scene.folder / "mnist" / "images.npy")[: scene.rows]
    labels = np.load(scene.folder / "mnist" / "labels.npy")[: scene.rows]
    return numbers(scene).shuffle(seed=1).map(lambda index: (images[index], labels[index]))


def scaled(row: tuple[Any, Any]) -> tuple[Any, Any]:
    return row[0].astype(np.float32) / 255, row[1]


def mnist_element_map(scene: Scene) -> Pass:
    return reading(mnist(scene).map(scaled).batch(128))


def mnist_batch_map(scene: Scene) -> Pass:
    return reading(mnist(scene).batch(128).map(scaled))


def jpeg(scene: Scene) -> Pass:
    paths = sorted((scene.folder / "jpegs").glob("*.jpg"))[: scene.rows]
    files = grain.MapDataset.source(paths).shuffle(seed=1)
    images = files.random_map(lambda path, draw: augmented(path.read_bytes(), draw), seed=1)
    return reading(images.batch(32), THREADS)


PASSES: Mapping[str, MakePass] = {
    "element_map": element_map,
    "batch_map": batch_map,
    "shuffle": shuffle,
    "filter": filter_numbers,
    "mnist_element_map": mnist_element_map,
    "mnist_batch_map": mnist_batch_map,
    "jpeg": jpeg,
}
