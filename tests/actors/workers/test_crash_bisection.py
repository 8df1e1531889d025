"""Crash bisection on fake workers. With Ray's workers: test_pool.py and test_hostile_functions.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import RayActorError

from raydist.actors.workers.crash_bisection import CrashBisection, RowsDone, RunRows, Streak, isolate
from raydist.actors.workers.handle import FailedStarts
from raydist.core.errors import CancelledError, UnavailableError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, StageResult
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.kernel import run_stage
from tests.pipelines.engine.toy_stages import SOURCE, block_of, spec_of


class Stillborn:
    """A worker that dies before it runs."""

    name = "worker-7"
    killed = 0

    def await_start(self, cancelled: Any) -> None:
        if cancelled():
            raise CancelledError("The pool was closed.")
        raise RayActorError

    def kill(self) -> None:
        self.killed += 1


def test_closing_gives_up_the_wait_and_the_worker() -> None:
    worker: Any = Stillborn()
    bisection = CrashBisection(InlineExecutor(), lambda: worker, lambda spec: (b"", b""), 1.0, FailedStarts())
    with pytest.raises(CancelledError, match="closed"):
        bisection.run(SPEC, BLOCK, (0,), lambda: True)
    assert worker.killed == 1


# --- elements that kill workers ---------------------------------------------------------------------------------------

SPEC = spec_of(SOURCE.map(lambda x: x * 10))
BLOCK = block_of(SOURCE)


def workers(deadly: Sequence[int], accidents: Sequence[int] = (), reason: str = "os._exit(3)") -> RunRows:
    """Workers that die on the rows `deadly`, with this exit reason, and without any on each of the rows `accidents`."""
    pending = list(accidents)

    def run_rows(first: int) -> RowsDone:
        results: list[StageResult] = []
        for row in range(first, BLOCK.num_rows):
            if row in deadly:
                return RowsDone(results, "worker-9", reason)
            if row in pending:
                pending.remove(row)
                break
            results.append(run_stage(SPEC, BLOCK.slice(row, row + 1), (100 + row,)))
        return RowsDone(results, "worker-9")

    return run_rows


def shape_of(result: StageResult) -> list[object]:
    return [item.rows() if isinstance(item, Block) else (item.index, str(item.error)[:49]) for item in result.items]


def message_of(result: StageResult, place: int) -> str:
    error = result.items[place]
    assert isinstance(error, ElementError)
    return str(error.error)


def test_an_element_that_kills_workers_is_an_error_in_its_place_and_kills_from_outside_condemn_nobody() -> None:
    result = isolate(SPEC, BLOCK, (100,), workers(deadly=[1, 4]), Streak())
    message = "A function must not end its process: map-1 (test_"
    assert shape_of(result) == [[0], (101, message), [20], [30], (104, message), [50]]
    assert result.inputs == (6,)
    assert "worker-9 on element 101 of its input, 2 times (os._exit(3))" in message_of(result, 1)
    silent = isolate(SPEC, BLOCK, (100,), workers(deadly=[2], reason=""), Streak())
    assert "on element 102 of its input, 6 times. It may" in message_of(silent, 2)
    innocent = isolate(SPEC, BLOCK, (100,), workers(deadly=[], accidents=[0, 0, *[3] * 5, 5]), Streak())
    assert shape_of(innocent) == [[0], [10], [20], [30], [40], [50]]


def test_many_condemned_elements_in_a_row_are_not_the_elements_fault() -> None:
    streak = Streak()
    assert len(isolate(SPEC, BLOCK, (100,), workers(deadly=[0, 2, 4, 5]), streak).items) == 6
    assert streak.length == 2, "the element before them did not fail"
    with pytest.raises(UnavailableError, match=r"on element 100 .*So did the 2 elements before it"):
        isolate(SPEC, BLOCK, (100,), workers(deadly=[0]), streak)
    streak.end()
    assert len(isolate(SPEC, BLOCK, (100,), workers(deadly=[0]), streak).items) == 6


# --- workers that die while they start --------------------------------------------------------------------------------


def test_what_raises_by_itself_is_not_tried_so_often() -> None:
    starts = FailedStarts()
    error = RuntimeError("The actor died because of an error raised in its creation task.")
    for _ in range(2):
        starts.add("worker", error)
    with pytest.raises(UnavailableError, match="as were the 2 before it"):
        starts.add("worker", error)
