"""raydist: batches on their way to a replica."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

import raydist as rd
from benchmarks.pipelines.data import BLOCK_BYTES
from benchmarks.pipelines.scene import MakePass, Pass, Scene

PREFETCHED = 4
PAUSE_S = 0.03


def blocks(count: int) -> rd.Dataset:
    """One batch is one block of 8 MB; making it costs no more than taking it from memory."""
    block = np.ones((1, BLOCK_BYTES // 4), np.float32)
    return rd.Dataset.from_tensors(block).repeat(count)


def read_all(batches: Iterator[torch.Tensor]) -> tuple[int, float]:
    """Bytes and seconds; runs in the replica. The clock starts with the first block."""
    next(batches)
    start = time.perf_counter()
    num_bytes = sum(batch.nbytes for batch in batches)
    return num_bytes, time.perf_counter() - start


def median_wait(batches: Iterator[torch.Tensor]) -> float:
    """Milliseconds of a `next` that comes a while after the one before; runs in the replica."""
    waits = []
    next(batches)
    for _ in range(50):
        time.sleep(PAUSE_S)
        start = time.perf_counter()
        if next(batches, None) is None:
            break
        waits.append(time.perf_counter() - start)
    return 1000 * float(np.median(waits))


def in_replica(
    scene: Scene, fn: Callable[[Any], Any], dataset: rd.Dataset, options: rd.InputOptions
) -> Callable[[], Any]:
    """`fn(iterator)` on the one replica of a strategy."""
    strategy = scene.resources.enter_context(rd.MirroredStrategy(1))
    scene.resources.enter_context(strategy.scope())
    view = strategy.distribute_dataset(dataset, options)
    return lambda: strategy.local_results(strategy.run(fn, args=(iter(view),)))[0]


def queue(scene: Scene, *, zero_copy: bool) -> Pass:
    options = rd.InputOptions(zero_copy=zero_copy, num_input_workers=0)
    run = in_replica(scene, read_all, blocks(scene.rows + 1), options)

    def measure() -> float:
        num_bytes, seconds = run()
        return float(num_bytes / seconds / 1e6)

    return measure


def object_store_queue(scene: Scene) -> Pass:
    return queue(scene, zero_copy=False)


def prefetched_next(scene: Scene) -> Pass:
    small = rd.Dataset.range((scene.rows + 1) * 256).batch(256)
    run = in_replica(scene, median_wait, small, rd.InputOptions(prefetch_batches=PREFETCHED, num_input_workers=0))
    return lambda: float(run())


PASSES: Mapping[str, MakePass] = {"object_store_queue": object_store_queue, "prefetched_next": prefetched_next}
