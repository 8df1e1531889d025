from __future__ import annotations

import subprocess
import sys

import pytest

from raydist.actors.workers.kept_pages import kept_bytes

FAULTS = """
import resource, sys
import numpy as np
from raydist.actors.workers.kept_pages import keep_pages
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [np.ones(600_000, np.uint8) for _ in range(8)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept = keep_pages(1 << 30)
faults()
print(kept, faults())
"""

IN_A_THREAD = """
import resource, threading
import numpy as np
from raydist.actors.workers.kept_pages import keep_pages
keep_pages(None)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        blocks = [np.ones(2 << 20, np.uint8) for _ in range(50)]
        while blocks:
            blocks.pop()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def work():
    faults()
    print(faults())
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_a_small_part_of_the_limit_is_kept() -> None:
    assert kept_bytes(None, {}) == (32 << 20, 256 << 20)
    assert kept_bytes(1 << 40, {}) == (32 << 20, 256 << 20)
    assert kept_bytes(64 << 20, {}) == (2 << 20, 8 << 20)


@pytest.mark.parametrize(
    "variable", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_"]
)
def test_what_the_user_has_set_stays(variable: str) -> None:
    assert kept_bytes(None, {variable: "1"}) is None
    assert kept_bytes(None, {"GLIBC_TUNABLES": f"glibc.malloc.{variable.lower()}=1:x=2"}) is None
    assert kept_bytes(None, {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_pages_that_were_freed_are_there_for_the_next_arrays() -> None:
    def run(**variables: str) -> list[str]:
        done = subprocess.run([sys.executable, "-c", FAULTS], env=variables, capture_output=True, text=True, check=True)
        return done.stdout.split()

    kept, faults = run()
    assert (kept, int(faults) < 500) == ("True", True)
    kept, faults = run(MALLOC_MMAP_THRESHOLD_="65536")
    assert (kept, int(faults) > 20_000) == ("False", True)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_heaps_of_threads_are_kept_where_they_are_empty() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_THREAD], env={}, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1_000
