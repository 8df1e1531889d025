from __future__ import annotations

import threading

import pytest

from raydist.errors import CancelledError, DeadlineExceededError
from raydist.options import Timeouts
from raydist.pipelines.engine.threads import ThreadExecutor
from tests.pipelines.engine.toy_stages import SOURCE, block_of, spec_of

BLOCK = block_of(SOURCE)


def test_blocks_run_side_by_side() -> None:
    both = threading.Barrier(2, timeout=20)
    spec = spec_of(SOURCE.map(lambda x: both.wait() * 0))
    executor = ThreadExecutor(2)
    pending = [executor.submit(spec, BLOCK.slice(i, i + 1), (i,)) for i in range(2)]
    assert [len(p.result().items) for p in pending] == [1, 1]
    executor.close()


def test_a_stuck_function_is_an_error_after_the_limit() -> None:
    release = threading.Event()
    executor = ThreadExecutor(1, Timeouts(element_s=0.05))
    pending = executor.submit(spec_of(SOURCE.map(lambda x: release.wait(20))), BLOCK.slice(0, 1), (0,))
    with pytest.raises(DeadlineExceededError, match=r"Stage stage must finish a block of 1 elements within 0\.05 s"):
        pending.result()
    release.set()
    executor.close()


def test_closing_gives_up_what_has_not_begun() -> None:
    begun, release = threading.Event(), threading.Event()

    def blocks(x: int) -> bool:
        begun.set()
        return release.wait(20)

    executor = ThreadExecutor(1)
    first = executor.submit(spec_of(SOURCE.map(blocks)), BLOCK.slice(0, 1), (0,))
    waiting = executor.submit(spec_of(SOURCE.map(blocks)), BLOCK.slice(1, 2), (1,))
    assert begun.wait(20)
    threading.Timer(0.02, release.set).start()
    executor.close()
    assert len(first.result().items) == 1
    with pytest.raises(CancelledError, match="closed before this block was begun"):
        waiting.result()
    with pytest.raises(CancelledError, match="needs an open executor"):
        executor.submit(spec_of(SOURCE.map(blocks)), BLOCK, (0,))
    executor.close()


def test_system_exit_in_a_function_reaches_the_caller() -> None:
    executor = ThreadExecutor(1)
    pending = executor.submit(spec_of(SOURCE.map(lambda x: exit(3))), BLOCK.slice(0, 1), (0,))
    with pytest.raises(SystemExit):
        pending.result()
    executor.close()
