"""raydist: images in memory and JPEG files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import raydist as rd
from benchmarks.pipelines.data import CROP, MEAN, STD
from benchmarks.pipelines.peers.raydist_passes import placed, reading
from benchmarks.pipelines.scene import MakePass, Pass, Scene


def mnist(scene: Scene) -> rd.Dataset:
    images = np.load(scene.folder / "mnist" / "images.npy")[: scene.rows]
    labels = np.load(scene.folder / "mnist" / "labels.npy")[: scene.rows]
    return rd.Dataset.from_tensor_slices((images, labels)).shuffle(10_000)


def scaled(image: Any, label: Any) -> Any:
    return image.astype(np.float32) / 255, label


def mnist_element_map(scene: Scene) -> Pass:
    return reading(placed(mnist(scene).map(scaled, scene.num_calls).batch(128), scene))


def mnist_batch_map(scene: Scene) -> Pass:
    return reading(placed(mnist(scene).batch(128).map(scaled, scene.num_calls), scene))


def augmented(path: str, *, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Only the part of the file that the crop needs is decoded."""
    data = rd.image.read_file(path)
    height, width, _ = rd.image.image_shape(data)
    window = (int(rng.integers(height - CROP + 1)), int(rng.integers(width - CROP + 1)), CROP, CROP)
    image = rd.image.decode_and_crop_jpeg(data, window, channels=3)
    normal: np.ndarray[Any, Any] = rd.image.normalize(rd.image.random_flip_left_right(image, rng=rng), MEAN, STD)
    return normal


def jpeg(scene: Scene) -> Pass:
    files = rd.Dataset.list_files(str(scene.folder / "jpegs" / "*.jpg"), shuffle=True).take(scene.rows)
    return reading(placed(files.map(augmented, scene.num_calls).batch(32), scene))


PASSES: Mapping[str, MakePass] = {
    "mnist_element_map": mnist_element_map,
    "mnist_batch_map": mnist_batch_map,
    "mnist_input_workers": mnist_element_map,
    "jpeg": jpeg,
    "jpeg_input_workers": jpeg,
}
