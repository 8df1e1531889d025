"""SPDL: threads in the consumer's process. Each makes whole batches, with the decoder that the other peers have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from spdl.pipeline import PipelineBuilder

from benchmarks.pipelines.data import CROP
from benchmarks.pipelines.peers.pictures import augmented
from benchmarks.pipelines.scene import MakePass, Pass, Scene

BATCH = 32
THREADS = 2


def batch_of(paths: Sequence[Path]) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng()
    batch = np.empty((len(paths), CROP, CROP, 3), np.float32)
    for row, path in zip(batch, paths, strict=True):
        row[:] = augmented(path.read_bytes(), draw)
    return batch


def jpeg(scene: Scene) -> Pass:
    paths = sorted((scene.folder / "jpegs").glob("*.jpg"))[: scene.rows]

    def read() -> int:
        order = [paths[index] for index in np.random.default_rng().permutation(len(paths))]
        batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        builder = PipelineBuilder().add_source(batches).pipe(batch_of, concurrency=THREADS).add_sink(3)
        pipeline = builder.build(num_threads=THREADS)
        with pipeline.auto_stop():
            return sum(map(len, pipeline))

    return read


PASSES: Mapping[str, MakePass] = {"jpeg": jpeg}
