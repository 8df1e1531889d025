"""An object store of 80 MB: readers that stop fill it with nothing, and what is larger than all of it comes through."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(150)]

PROGRAM = """
import time
import numpy as np, ray
import raydist as rd
from ray._private.internal_api import memory_summary

MIB = 1 << 20
ray.init("local", object_store_memory=80 * MIB, include_dashboard=False, num_cpus=2)

def store():
    return memory_summary(address=ray.get_runtime_context().gcs_address, stats_only=True).splitlines()[-3:]

def stop_after_one(batches):
    total = float(next(batches).sum())
    time.sleep(2)
    return total

def read_all(batches):
    return sum(float(batch.sum()) for batch in batches)

with rd.MirroredStrategy(2, resources_per_replica={"CPU": 0.01}) as strategy:
    rows = rd.Dataset.range(60).map(lambda i: np.full(MIB // 4, i, np.float32)).batch(8)
    batches = iter(strategy.distribute_dataset(rows))
    total = strategy.reduce(rd.ReduceOp.SUM, strategy.run(stop_after_one, args=(batches,)))
    print("stopped:", *store())
    total += strategy.reduce(rd.ReduceOp.SUM, strategy.run(read_all, args=(batches,)))
    print("total:", int(total) * 4 // MIB)

    rows = rd.Dataset.range(2).map(lambda i: np.full(100 * MIB // 4, i + 1, np.float32)).batch(2)
    batches = iter(strategy.distribute_dataset(rows))
    print("large:", strategy.local_results(strategy.run(read_all, args=(batches,))))
"""


@pytest.fixture(scope="module")
def output() -> str:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=140, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_replicas_that_stop_reading_make_nothing_spill_and_lose_nothing(output: str) -> None:
    (stopped,) = re.findall("^stopped: (.*)$", output, flags=re.MULTILINE)
    held = re.search(r"Plasma memory usage (\d+) MiB", stopped)
    assert held is not None
    assert int(held[1]) <= 48
    assert "pilled" not in stopped
    assert f"total: {sum(range(60))}\n" in output


def test_pieces_larger_than_the_store_arrive(output: str) -> None:
    assert f"large: ({100 * (1 << 20) / 4}, {2 * 100 * (1 << 20) / 4})\n" in output
