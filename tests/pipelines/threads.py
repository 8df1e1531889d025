"""Several threads that share something."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

__all__ = ["in_threads", "pipeline_threads", "quick_switches"]


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns every few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(count: int, work: Callable[[], None]) -> None:
    """Run `work` in so many threads at once; the first exception of one of them is raised."""
    start = threading.Barrier(count)

    def run() -> None:
        start.wait()
        work()

    with ThreadPoolExecutor(count) as pool:
        for running in [pool.submit(run) for _ in range(count)]:
            running.result(30)


def pipeline_threads() -> list[threading.Thread]:
    """Threads of pipelines that run now, and not those of strategies and pools that fixtures keep open."""
    return [each for each in threading.enumerate() if re.fullmatch(r"raydist-(?!input)\w+-\d+(-prefetch)?", each.name)]
