"""Ray Data, on a local Ray."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
from ray.data.expressions import col

from benchmarks.pipelines.data import COLUMNS, FILTER_COLUMN, THRESHOLD
from benchmarks.pipelines.peers.pictures import augmented
from benchmarks.pipelines.scene import MakePass, Pass, Scene


def start_ray(scene: Scene) -> None:
    ray.init(
        address="local",
        num_cpus=scene.num_workers,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    scene.resources.callback(ray.shutdown)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False


def reading(scene: Scene, make: Any, **settings: Any) -> Pass:
    """A pass over batches of numpy arrays."""
    start_ray(scene)
    dataset = make(scene)

    def read() -> int:
        batches = dataset.iter_batches(batch_format="numpy", **settings)
        return sum(len(next(iter(batch.values()))) for batch in batches)

    return read


def numbers(scene: Scene) -> Any:
    return ray.data.range(scene.rows)


def doubled_rows(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"] * 2 + 1}


def element_map(scene: Scene) -> Pass:
    return reading(scene, lambda scene: numbers(scene).map(doubled_rows), batch_size=1024)


def batch_map(scene: Scene) -> Pass:
    return reading(scene, lambda scene: numbers(scene).map_batches(doubled_rows), batch_size=1024)


def shuffle(scene: Scene) -> Pass:
    return reading(scene, numbers, batch_size=1024, local_shuffle_buffer_size=10_000)


def filter_numbers(scene: Scene) -> Pass:
    return reading(scene, lambda scene: numbers(scene).filter(lambda row: row["id"] % 3 == 0), batch_size=500)


def mnist(scene: Scene) -> Any:
    images = np.load(scene.folder / "mnist" / "images.npy")[: scene.rows]
    labels = np.load(scene.folder / "mnist" / "labels.npy")[: scene.rows]
    return ray.data.from_numpy(images).zip(ray.data.from_numpy(labels).rename_columns({"data": "label"})).materialize()


def scaled(row: dict[str, Any]) -> dict[str, Any]:
    return {"image": row["data"].astype(np.float32) / 255, "label": row["label"]}


def mnist_element_map(scene: Scene) -> Pass:
    return reading(scene, lambda scene: mnist(scene).map(scaled), batch_size=128, local_shuffle_buffer_size=10_000)


def mnist_batch_map(scene: Scene) -> Pass:
    return reading(
        scene, lambda scene: mnist(scene).map_batches(scaled), batch_size=128, local_shuffle_buffer_size=10_000
    )


class Augment:
    """A function with a generator of its own for each worker."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"image": augmented(row["bytes"], self.draw)}


def jpeg(scene: Scene) -> Pass:
    def make(scene: Scene) -> Any:
        paths = [str(path) for path in sorted((scene.folder / "jpegs").glob("*.jpg"))[: scene.rows]]
        augment: Any = Augment  # Ray Data's types know functions only
        files = ray.data.read_binary_files(paths, shuffle="files", override_num_blocks=4 * scene.num_workers)
        return files.map(augment, concurrency=scene.num_workers)

    return reading(scene, make, batch_size=32)


def parquet(scene: Scene) -> Pass:
    def make(scene: Scene) -> Any:
        rows = ray.data.read_parquet(str(scene.folder / "parquet" / "rows.parquet"), columns=list(COLUMNS))
        return rows.filter(expr=col(FILTER_COLUMN) > THRESHOLD)

    return reading(scene, make, batch_size=4096, local_shuffle_buffer_size=10_000)


PASSES: Mapping[str, MakePass] = {
    "element_map": element_map,
    "batch_map": batch_map,
    "shuffle": shuffle,
    "filter": filter_numbers,
    "mnist_element_map": mnist_element_map,
    "mnist_batch_map": mnist_batch_map,
    "mnist_input_workers": mnist_element_map,
    "jpeg_input_workers": jpeg,
    "parquet": parquet,
}
