"""Sizes of blocks, requests and buffers, and the budgets of threads and memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raydist.core.machine import free_in_containers
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.engine.block_size import BlockSize, BufferSize
from raydist.pipelines.engine.budget import Budget
from raydist.pipelines.engine.request_size import RequestSize
from tests.pipelines.threads import in_threads


def learn(size: BlockSize, rows: int, seconds: float, row_bytes: int = 8) -> None:
    block = block_of_rows([np.zeros(row_bytes, np.uint8)] * rows)
    assert isinstance(block, Block)
    size.learn(block, StageResult((block,), (rows,), ("",), busy_s=seconds))


def test_the_consumer_is_given_what_it_wants_within_a_number_of_bytes() -> None:
    size = BlockSize(away=False)
    assert [size.rows(limit, 4, 1) for limit in (1, 4, 9, 10**6)] == [1, 1, 3, 64]
    learn(size, rows=3, seconds=0.001, row_bytes=1 << 10)
    assert size.rows(10**6, 4, 1) == 4096
    learn(size, rows=3, seconds=0.001, row_bytes=1 << 20)
    assert size.rows(10**6, 4, 1) == 8
    assert size.rows(1, 1, 5) == 5
    assert BlockSize(away=False, element_bytes=792).rows(2560, 1, 1) == 2560, "known: no first small block"
    assert BlockSize(away=False, element_bytes=4 << 20).rows(2560, 1, 1) == 2


def test_blocks_for_other_processes_grow_until_they_are_worth_their_way() -> None:
    size = BlockSize(away=True)
    grown = []
    for _ in range(12):
        rows = size.rows(1, 4, 1)
        grown.append(rows)
        learn(size, rows, seconds=rows * 10e-6)
    assert grown == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1000]


def test_a_slow_input_is_not_asked_for_more_than_is_wanted() -> None:
    size = BlockSize(away=True)
    for _ in range(6):
        learn(size, size.rows(1, 4, 1), seconds=1e-6)
    assert size.rows(1, 4, 1) == 64
    for _ in range(3):
        size.learn_input(0.5)
    assert size.rows(1, 4, 1) == 8


def test_8_mib_fit_and_a_batch_made_elsewhere_may_be_larger() -> None:
    for away, together, rows in ((False, 3, 6), (False, 10, 8), (True, 20, 20), (True, 40, 16)):
        size = BlockSize(away=away, together=together)
        learn(size, rows=3, seconds=0.001, row_bytes=1 << 20)
        assert size.rows(100, 1, 1) == rows, (away, together)


def drain(size: BufferSize) -> None:
    size.filled()
    size.asked(0)


def test_a_buffer_grows_when_it_is_empty_after_it_was_full() -> None:
    size = BufferSize(2, tuned=True)
    for _ in range(1000):
        size.asked(0)
    assert size.size == 2, "never full: more room would not help"
    sizes = []
    for _ in range(12):
        drain(size)
        sizes.append(size.size)
    assert sizes == [4, 8, 16, 32, 64, 128, 256, 512, *[1024] * 4]
    fixed = BufferSize(3, tuned=False)
    drain(fixed)
    assert fixed.size == 3


def requests(
    monkeypatch: pytest.MonkeyPatch,
    times: int = 20,
    most: int = 4096,
    limit: int = 1 << 40,
    *,
    row_bytes: int = 8,
    row_seconds: float = 0.0,
    every: int = 1,
) -> list[int]:
    """Sizes of the requests to a source on a clock of its own, which hands out one of `every` elements."""
    asked: list[int] = []

    def next_block(limit: int) -> Block:
        asked.append(limit)
        return block_of_rows([np.zeros(row_bytes, np.uint8)] * max(1, limit // every))

    source: Any = SimpleNamespace(next_block=next_block)
    clock = "raydist.pipelines.engine.request_size.time.perf_counter"
    monkeypatch.setattr(clock, lambda: sum(asked) * row_seconds)
    request = RequestSize(most)
    for _ in range(times):
        request.read(source, limit)
    return asked


def test_requests_grow_while_elements_are_quick_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = partial(requests, monkeypatch)
    assert ask(times=8, most=64) == [1, 2, 4, 8, 16, 32, 64, 64]
    assert max(ask(limit=3)) <= 3, "the caller's limit holds"
    assert set(ask(row_seconds=1.0)) == {1}
    assert max(ask(row_seconds=0.0011)) == 2
    for row_bytes, most in ((200_000, 8), (1 << 20, 4), (3 << 20, 1), (1 << 16, 16)):
        assert max(ask(row_bytes=row_bytes)) == most
    assert max(ask(every=10)) == 4096, "a source that hands out fewer elements is asked for more"
    for every in (10_000, 4096):
        assert max(ask(every=every)) == 32, "so many may come at once, too large or too late"


def test_no_more_is_granted_than_there_is() -> None:
    budget = Budget(5)
    assert [budget.take(3), budget.take(3), budget.take(3)] == [3, 2, 0]
    budget.give(2)
    budget.charge(7)
    assert (budget.free, budget.take(9)) == (-5, 0), "what is there already is counted even beyond the limit"
    budget.charge(-7)
    assert budget.take(9) == 2
    shared, taken = Budget(1000), list[int]()
    in_threads(4, lambda: taken.append(sum(shared.take(1) for _ in range(500))))
    assert sum(taken) == 1000


def test_cached_files_of_a_container_are_free(tmp_path: Path) -> None:
    for number, (limit_name, limit, used_name, free) in enumerate(
        (
            ("memory.max", "1000", "memory.current", [550]),
            ("memory.max", "max", "memory.current", []),
            ("memory.limit_in_bytes", "1000", "memory.usage_in_bytes", [550]),
        )
    ):
        group = tmp_path / str(number)
        group.mkdir()
        (group / limit_name).write_text(f"{limit}\n")
        (group / used_name).write_text("800\n")
        (group / "memory.stat").write_text("anon 400\nfile 400\nshmem 50\ninactive_file 300\nactive_file 50\n")
        assert free_in_containers([tmp_path / "none", group]) == free, (limit_name, limit)
