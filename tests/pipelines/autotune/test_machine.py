from __future__ import annotations

import os

from raydist.pipelines.autotune.machine import free_memory, num_cores


def test_cores_are_those_of_this_process() -> None:
    assert 1 <= num_cores() <= (os.cpu_count() or 1)


def test_memory_is_what_is_free() -> None:
    assert 1 << 20 < free_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
