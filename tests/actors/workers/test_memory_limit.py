"""The limit is tried in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raydist.actors.workers.memory_limit import limit_memory

CODE = """
import numpy as np
from raydist.actors.workers.memory_limit import limit_memory

print(limit_memory({limit}))
np.ones(20 << 20, np.uint8)
try:
    np.ones(1 << 44, np.uint8)
except MemoryError as error:
    print(type(error).__mro__[1].__name__)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits what a process has mapped for itself")
@pytest.mark.parametrize("limit", [200 << 20, None])
def test_a_process_cannot_take_more(limit: int | None) -> None:
    done = subprocess.run([sys.executable, "-c", CODE.format(limit=limit)], capture_output=True, text=True, timeout=50)
    room, error = done.stdout.split()
    assert int(room) == limit if limit else int(room) > 20 << 20
    assert error == "MemoryError", done.stderr


def test_other_systems_have_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert limit_memory(1) is None


FAULTS = """
import resource, threading
import numpy as np
from raydist.actors.workers.memory_limit import keep_freed_memory
def faults(num_rounds, num_blocks, num_bytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(num_rounds):
        blocks = [np.ones(num_bytes, np.uint8) for _ in range(num_blocks)]
        while blocks:
            blocks.pop()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def work():
    faults({sizes})
    print(faults({sizes}))
keep_freed_memory({limit})
thread = threading.Thread(target=work)
{start}
"""


def num_faults(start: str, sizes: str, limit: int | None, **variables: str) -> int:
    code = FAULTS.format(start=start, sizes=sizes, limit=limit)
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, timeout=50, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_there_for_the_next_arrays_unless_the_user_has_set_malloc_up() -> None:
    assert num_faults("work()", "20, 8, 600_000", 1 << 30) < 500
    assert num_faults("work()", "20, 8, 600_000", 1 << 30, MALLOC_MMAP_THRESHOLD_="65536") > 20_000
    tunable = "glibc.malloc.mmap_threshold=65536"
    assert num_faults("work()", "20, 8, 600_000", 1 << 30, GLIBC_TUNABLES=tunable) > 20_000


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_heaps_of_threads_are_kept_where_they_are_empty() -> None:
    assert num_faults("thread.start(); thread.join()", "5, 50, 2 << 20", None) < 1_000
