from __future__ import annotations

import contextlib
import threading

import pytest

from raydist.core.errors import CancelledError, DeadlineExceededError
from raydist.options import Timeouts
from raydist.pipelines.engine.budget import Budget
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


def test_closing_beside_who_starts_threads_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, entered, go_on = Budget(), threading.Event(), threading.Event()
    take = budget.take

    def held(wanted: int) -> int:
        entered.set()
        go_on.wait(10)
        return take(wanted)

    monkeypatch.setattr(budget, "take", held)
    executor = ThreadExecutor(0, budget=budget)
    starts = threading.Thread(target=executor.resize, args=(2,))
    starts.start()
    assert entered.wait(10)
    closes = threading.Thread(target=executor.close)
    closes.start()
    closes.join(0.2)
    go_on.set()
    for thread in (starts, closes):
        thread.join(10)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("raydist-map")]


def test_what_comes_beside_closing_is_refused_or_cancelled() -> None:
    spec, block = spec_of(SOURCE.map(lambda x: x)), BLOCK.slice(0, 1)
    for _ in range(50):
        executor = ThreadExecutor(1, Timeouts(element_s=5.0))
        executor.submit(spec, block, (0,)).result()
        closes = threading.Thread(target=executor.close)
        closes.start()
        with contextlib.suppress(CancelledError):
            while True:
                executor.submit(spec, block, (0,)).result()
        closes.join(10)
