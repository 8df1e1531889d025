"""All workloads."""

from __future__ import annotations

from benchmarks.pipelines.contenders import RAYDIST
from benchmarks.pipelines.workload import Workload

_TF = "tf.data"
_SERVICE = "tf.data service, 2 workers"
_LOADERS = ("DataLoader", "DataLoader, 2 workers")
_RAY_DATA = "Ray Data"
_GRAIN = "grain"
_SPDL = "SPDL"
_EVERYONE = (RAYDIST, _TF, _SERVICE, *_LOADERS, _RAY_DATA, _GRAIN)
_BY_HAND = ("raydist, 1 call by hand", "raydist, 2 calls by hand", "raydist, 4 calls by hand")
_ONE_WORKER, _TWO_WORKERS = "raydist, 1 input worker", "raydist, 2 input workers"

WORKLOADS = (
    Workload("element_map", "range, map(x*2+1) per element, batch(1024)", 500_000, 5_000, _EVERYONE),
    Workload("batch_map", "range, batch(1024), map(x*2+1) per batch", 2_000_000, 20_000, _EVERYONE),
    Workload("shuffle", "range, shuffle(10,000), batch(1024)", 2_000_000, 20_000, _EVERYONE),
    Workload(
        "filter", "range, filter(x % 3 == 0), batch(500)", 300_000, 3_000, (RAYDIST, _TF, *_LOADERS, _RAY_DATA, _GRAIN)
    ),
    Workload("window", "range, window(5, shift=1), flat_map(batch), batch(64)", 30_000, 300, (RAYDIST, _TF, *_LOADERS)),
    Workload("interleave", "60 ranges interleaved, cycle 8, block 4", 120_000, 1_200, (RAYDIST, _TF)),
    Workload(
        "mnist_element_map",
        "images 28x28: shuffle(10,000), map(/255) per element, batch(128)",
        10_000,
        1_000,
        (*_EVERYONE, *_BY_HAND),
        data=("mnist",),
    ),
    Workload(
        "mnist_batch_map",
        "images 28x28: shuffle(10,000), batch(128), map(/255) per batch",
        10_000,
        1_000,
        (*_EVERYONE, *_BY_HAND),
        data=("mnist",),
    ),
    Workload(
        "mnist_input_workers",
        "images 28x28: shuffle(10,000), map(/255) per element, batch(128), on worker processes",
        10_000,
        1_000,
        (_TWO_WORKERS, _SERVICE, _LOADERS[1], _RAY_DATA),
        data=("mnist",),
    ),
    Workload(
        "mnist_tfrecords",
        "8 TFRecord files: interleave, shuffle(2,000), batch(128), parse_example per batch",
        10_000,
        1_000,
        (RAYDIST, _TF, _SERVICE, *_BY_HAND),
        data=("mnist_tfrecords",),
    ),
    Workload(
        "jpeg",
        "JPEGs 500x375: decode, random crop 224, flip, normalise, batch(32)",
        400,
        32,
        (RAYDIST, _TF, *_LOADERS, _GRAIN, _SPDL, *_BY_HAND),
        data=("jpegs",),
    ),
    Workload(
        "jpeg_input_workers",
        "the same on worker processes",
        400,
        32,
        (_TWO_WORKERS, RAYDIST, _SERVICE, _LOADERS[1], _RAY_DATA),
        data=("jpegs",),
    ),
    Workload(
        "parquet",
        "Parquet, 20 float columns: 4 columns, filter, shuffle(10,000), batch(4096)",
        5_000_000,
        50_000,
        (RAYDIST, _TF, _RAY_DATA, *_BY_HAND),
        data=("parquet",),
    ),
    Workload(
        "object_store_queue",
        "blocks of 8 MB through the object store to one replica",
        100,
        4,
        (RAYDIST, "raydist, zero_copy", "ray.put + ray.get"),
        unit="MB/s",
    ),
    Workload(
        "prefetched_next",
        "next() of a batch that is ready, in a replica",
        50,
        4,
        (RAYDIST,),
        unit="ms",
        smaller_is_better=True,
    ),
    Workload(
        "input_worker_scaling",
        "a map of 5 ms of computing per row, batch(8)",
        400,
        8,
        (_TWO_WORKERS, _ONE_WORKER),
    ),
    Workload(
        "memory",
        "4 KB rows, shuffle(10,000), batch(256): peak memory over idle",
        1_000_000,
        20_000,
        (RAYDIST, _TF),
        unit="MB",
        smaller_is_better=True,
    ),
    Workload(
        "state",
        "state of an iterator three epochs into shuffle(1,000,000).batch(256).repeat()",
        1_000_000,
        10_000,
        (RAYDIST,),
        unit="bytes",
        smaller_is_better=True,
    ),
)
