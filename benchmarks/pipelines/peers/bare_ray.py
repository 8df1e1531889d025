"""Ray's object store without anything around it: `ray.put` and `ray.get` in one process, one block after the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import numpy as np
import ray

from benchmarks.pipelines.data import BLOCK_BYTES
from benchmarks.pipelines.scene import MakePass, Pass, Scene


def object_store_queue(scene: Scene) -> Pass:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    scene.resources.callback(ray.shutdown)
    block = np.ones(BLOCK_BYTES // 4, np.float32)

    def measure() -> float:
        start = time.perf_counter()
        num_bytes = sum(ray.get(ray.put(block)).nbytes for _ in range(scene.rows))
        return float(num_bytes / (time.perf_counter() - start) / 1e6)

    return measure


PASSES: Mapping[str, MakePass] = {"object_store_queue": object_store_queue}
