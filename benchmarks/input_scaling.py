"""CPU seconds of each process for a gigabyte of input: where the bytes of a pipeline pass.

    python -m benchmarks.input_scaling                  # all pipelines
    python -m benchmarks.input_scaling --only tfrecord_map_batch --gigabytes 0.5

Two input workers and two replicas; records of 10 KB. Figures are CPU time from /proc, which other load changes little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

import raydist as rd
from benchmarks.processes import Process, read_processes, started_by
from raydist.core.nest import leaves_in

RECORD_BYTES = 10_000
NUM_FILES = 8
_KINDS = (
    ("InputPipeline", "pipeline"),
    ("InputWorker", "workers"),
    ("ReplicaHost", "replicas"),
)


def _parse(record: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(record, np.uint8)


def _parse_batch(records: Any) -> np.ndarray[Any, Any]:
    return np.stack([np.frombuffer(record, np.uint8) for record in records])


def _same(batch: Any) -> Any:
    return batch


PIPELINES: dict[str, Callable[[list[str]], rd.Dataset]] = {
    "tfrecord_map_batch": lambda files: rd.TFRecordDataset(files).map(_parse).batch(64),
    "tfrecord_batch_map": lambda files: rd.TFRecordDataset(files).batch(64).map(_parse_batch),
    "interleave_map_batch": lambda files: (
        rd.Dataset.from_tensor_slices(files).interleave(rd.TFRecordDataset, cycle_length=4).map(_parse).batch(64)
    ),
    "tfrecord_shuffle_map_batch": lambda files: rd.TFRecordDataset(files).shuffle(10_000, seed=1).map(_parse).batch(64),
    "parquet_map_batches_batch": lambda files: (
        rd.Dataset.from_parquet([f + ".parquet" for f in files]).map_batches(_same, 64).batch(64)
    ),
}


def write_files(folder: Path, gigabytes: float) -> list[str]:
    """Write TFRecord files and Parquet files of `gigabytes` each; return the names of the first."""
    rng = np.random.default_rng(0)
    per_file = int(gigabytes * 1e9 / RECORD_BYTES / NUM_FILES)
    files = []
    for number in range(NUM_FILES):
        rows = rng.integers(0, 256, (per_file, RECORD_BYTES), np.uint8)
        path = str(folder / f"{number}.tfrecord")
        with rd.TFRecordWriter(path) as writer:
            for row in rows:
                writer.write(row.tobytes())
        column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), RECORD_BYTES)
        pq.write_table(pa.table({"x": column}), path + ".parquet", row_group_size=512, compression=None)
        files.append(path)
    return files


def _name_of(process: Process, root: int) -> str:
    if process.pid == root:
        return "driver"
    return next((kind for mark, kind in _KINDS if mark in process.command), "ray")


def _cpu(root: int) -> dict[str, float]:
    sums: dict[str, float] = {}
    for process in started_by(root, read_processes()):
        name = _name_of(process, root)
        sums[name] = sums.get(name, 0.0) + process.cpu_ms / 1000
    return sums


def measure(dataset: rd.Dataset, strategy: Any) -> dict[str, float]:
    """Read a dataset once on the replicas; return seconds, gigabytes, and CPU seconds by kind of process."""

    def read(iterator: Any) -> int:
        return sum(leaf.numel() for batch in iterator for leaf in leaves_in(batch))

    options = rd.InputOptions(num_input_workers=2)
    distributed = strategy.distribute_dataset(dataset, options)
    before, begin = _cpu(os.getpid()), time.perf_counter()
    num_bytes = sum(strategy.run(read, args=(iter(distributed),)).values)
    seconds, after = time.perf_counter() - begin, _cpu(os.getpid())
    gigabytes = num_bytes / 1e9
    spent = {kind: (after.get(kind, 0.0) - before.get(kind, 0.0)) / gigabytes for kind in after}
    return {"seconds": seconds, "gigabytes": gigabytes, **spent, "all": sum(spent.values())}


def main() -> None:
    """Print a line for each pipeline."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=list(PIPELINES))
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    given = parser.parse_args()
    ray.init(num_cpus=4, object_store_memory=3 << 30, log_to_driver=False)
    strategy = rd.MirroredStrategy(["cpu:0", "cpu:1"])
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, strategy:
        files = write_files(Path(folder), given.gigabytes)
        for name in given.only:
            runs = [measure(PIPELINES[name](files), strategy) for _ in range(given.repeats)]
            results[name] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            shown = ", ".join(f"{key} {value:.2f}" for key, value in results[name].items())
            print(f"{name}: {shown} (CPU s per GB)", flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
