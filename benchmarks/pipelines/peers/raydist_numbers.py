"""raydist: ranges of numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

import raydist as rd
from benchmarks.pipelines.peers.raydist_passes import placed, reading
from benchmarks.pipelines.scene import MakePass, Pass, Scene

WORK_S = 0.005


def element_map(scene: Scene) -> Pass:
    return reading(rd.Dataset.range(scene.rows).map(lambda x: x * 2 + 1).batch(1024))


def batch_map(scene: Scene) -> Pass:
    return reading(rd.Dataset.range(scene.rows).batch(1024).map(lambda x: x * 2 + 1))


def shuffle(scene: Scene) -> Pass:
    return reading(rd.Dataset.range(scene.rows).shuffle(10_000).batch(1024))


def filter_numbers(scene: Scene) -> Pass:
    return reading(rd.Dataset.range(scene.rows).filter(lambda x: x % 3 == 0).batch(500))


def window(scene: Scene) -> Pass:
    windows = rd.Dataset.range(scene.rows).window(5, shift=1, drop_remainder=True)
    return reading(windows.flat_map(lambda window: window.batch(5)).batch(64))


def interleave(scene: Scene) -> Pass:
    length = scene.rows // 60
    ranges = rd.Dataset.range(60)
    return reading(
        ranges.interleave(
            lambda i: rd.Dataset.range(i * length, (i + 1) * length), cycle_length=8, block_length=4
        ).batch(256)
    )


def compute(x: np.int64) -> np.int64:
    """Keep one core busy for a while."""
    end = time.thread_time() + WORK_S
    while time.thread_time() < end:
        pass
    return x


def input_worker_scaling(scene: Scene) -> Pass:
    return reading(placed(rd.Dataset.range(scene.rows).map(compute).batch(8), scene))


PASSES: Mapping[str, MakePass] = {
    "element_map": element_map,
    "batch_map": batch_map,
    "shuffle": shuffle,
    "filter": filter_numbers,
    "window": window,
    "interleave": interleave,
    "input_worker_scaling": input_worker_scaling,
}
