"""An object store of 80 MB: readers that stop fill it with nothing, and what is larger than all of it comes through.

A program does it, and tells what it sees.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

MOST_HELD = 48  # MiB of the store, while somebody does not read: what is ready for both replicas, and in their hands
NUM_ROWS = 160  # rows of 1 MiB: two stores full

PROGRAM = r"""
import os, re, sys, time
import numpy as np, ray, torch
import raydist as rd
from ray._private.internal_api import memory_summary

MIB = 1 << 20
ray.init("local", object_store_memory=80 * MIB, include_dashboard=False, num_cpus=2)

def store():
    return memory_summary(address=ray.get_runtime_context().gcs_address, stats_only=True).partition("Plasma")[2]

def held():
    return int(re.match(r" memory usage (\d+) MiB", store())[1])

def numbered(num_rows, mib):
    return rd.Dataset.range(num_rows).map(lambda i: np.full(mib * MIB // 4, i + 1, np.float32))

def own(batch):
    return batch[: rd.get_replica_context().num_rows]  # without rows that a replica stands in for

def read_all(batches, after_each=lambda: None):
    total = rows = 0
    for batch in batches:
        total += int(own(batch).sum(dtype=torch.float64)) // batch[0].numel()
        rows += len(own(batch))
        after_each()
    return total, rows

strategy = rd.MirroredStrategy(2, resources_per_replica={"CPU": 0.01})

def begin(rows, workers=None, **settings):
    options = rd.InputOptions(**({} if workers is None else {"num_input_workers": workers}), **settings)
    return iter(strategy.distribute_dataset(rows, options))

def sums(result):
    return [strategy.local_results(each) for each in result]

def both(result):
    return [sum(each) for each in sums(result)]

NUM_ROWS, FOLDER = int(sys.argv[1]), sys.argv[2]
NO, YES = torch.tensor(False), torch.tensor(True)

def tell_twice(what):
    for _ in range(2):
        print(what, held(), "spilled" if "pilled" in store() else "kept")
        time.sleep(1.5)

def stop_after_one(batches):
    batch = own(next(batches))
    return int(batch[:, -1].sum()), len(batch)

def read_telling(batches, waits):
    def tell():
        rank = rd.get_replica_context().replica_id_in_sync_group
        with open(f"{FOLDER}/read-by-{rank}", "a") as file:
            file.write("x")
        while waits and rank == 0 and not os.path.exists(f"{FOLDER}/go"):
            time.sleep(0.05)

    return read_all(batches, tell)

def await_standstill(path):
    size, since = -1, time.monotonic()
    while size < 2 or time.monotonic() - since < 2:
        if os.path.getsize(path) != size:
            size, since = os.path.getsize(path), time.monotonic()
        time.sleep(0.1)
    return size

def one_stops():
    open(f"{FOLDER}/read-by-1", "w").close()
    result = strategy.run(read_telling, args=(begin(numbered(NUM_ROWS, 1).batch(8)), YES))
    print("read alone:", await_standstill(f"{FOLDER}/read-by-1"))
    tell_twice("one stops:")
    open(f"{FOLDER}/go", "w").close()
    print("after one:", *both(result))

level = held()
with strategy:
    batches = begin(numbered(NUM_ROWS, 1).batch(8))
    head = both(strategy.run(stop_after_one, args=(batches,)))
    tell_twice("both stop:")
    rest = both(strategy.run(read_telling, args=(batches, NO)))  # a function's first results are waited for
    print("after both:", *(a + b for a, b in zip(head, rest)))
    one_stops()
    print("large:", *sums(strategy.run(read_all, args=(begin(numbered(2, 100).batch(2)),))))
    batches = begin(numbered(3, 300).batch(1), 0, split="balanced")
    print("rows of 300 MiB:", *sums(strategy.run(read_all, args=(batches,))))
    batches.close()
    deadline = time.monotonic() + 20
    while held() > level and time.monotonic() < deadline:
        time.sleep(0.2)
    print("left:", held() - level)
"""


def check_stop(output: str, who: str) -> None:
    """Nothing is spilled or lost, and little is held."""
    found = re.findall(rf"^{who}: (\d+) (\w+)$", output, flags=re.MULTILINE)
    assert [state for _, state in found] == ["kept", "kept"]
    assert max(int(mib) for mib, _ in found) <= MOST_HELD
    assert f"after {who.split()[0]}: {sum(range(1, NUM_ROWS + 1))} {NUM_ROWS}\n" in output


@pytest.mark.long
def test_readers_that_stop_fill_nothing_and_what_is_larger_than_the_store_comes_through(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(NUM_ROWS), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    output = done.stdout
    assert done.returncode == 0, output + done.stderr
    check_stop(output, "both stop")
    check_stop(output, "one stops")
    (alone,) = re.findall(r"^read alone: (\d+)$", output, flags=re.MULTILINE)
    assert 2 <= int(alone) < MOST_HELD // 8  # the other goes on until enough is ready
    assert "large: (1, 2) (1, 1)\n" in output
    assert "rows of 300 MiB: (4, 2) (2, 1)\n" in output  # sums, and how many rows
    assert "left: 0\n" in output
