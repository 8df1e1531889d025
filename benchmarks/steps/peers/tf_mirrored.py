"""TensorFlow's MirroredStrategy on logical CPU devices of this process, one thread each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.steps.scene import Run, Scene, timed


def mlp(width: int) -> list[Any]:
    dense = tf.keras.layers.Dense
    return [tf.keras.layers.Flatten(), dense(width, "relu"), dense(width, "relu"), dense(10)]


def cnn() -> list[Any]:
    layers = tf.keras.layers
    first = [layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPooling2D()]
    second = [layers.Conv2D(64, 3, padding="same", activation="relu"), layers.MaxPooling2D()]
    return [*first, *second, layers.Flatten(), layers.Dense(128, "relu"), layers.Dense(10)]


MODELS: Mapping[str, tuple[Callable[[], list[Any]], int]] = {
    "mlp16": (lambda: mlp(16), 128),
    "mlp1024": (lambda: mlp(1024), 256),
    "cnn": (cnn, 256),
}


def images(folder: Path, global_batch: int) -> Any:
    """Channels last, as TensorFlow's kernels for CPUs want them."""
    pixels = np.load(folder / "mnist" / "images.npy").astype(np.float32)[..., None] / 255
    labels = np.load(folder / "mnist" / "labels.npy").astype(np.int64)
    return tf.data.Dataset.from_tensor_slices((pixels, labels)).repeat().batch(global_batch).prefetch(tf.data.AUTOTUNE)


@functools.cache
def make_strategy(num_replicas: int) -> Any:
    """One for the process: a second one would number its collective operations from the start again."""
    if len(tf.config.list_logical_devices("CPU")) != num_replicas:
        raise AssertionError("Logical devices are made when this module is imported.")
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(num_replicas)])


def make_runs(scene: Scene) -> Mapping[str, Run]:
    make_layers, global_batch = MODELS[scene.workload]
    strategy = make_strategy(scene.ranks)
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input((28, 28, 1)), *make_layers()])
        optimizer = tf.keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    batches = iter(strategy.experimental_distribute_dataset(images(scene.folder, global_batch)))

    def replica_step(pixels: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(pixels, training=True)) / global_batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow ships no type information
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    def train(count: int) -> None:
        for _ in range(count):
            loss = step(next(batches))
        loss.numpy()

    return {"step": lambda count: timed(lambda: train(count))}


tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
