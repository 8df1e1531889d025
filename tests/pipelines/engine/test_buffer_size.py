from __future__ import annotations

from raydist.pipelines.engine.block_size import BufferSize


def drain(size: BufferSize) -> None:
    size.filled()
    size.asked(0)


def test_it_grows_when_it_is_empty_after_it_was_full() -> None:
    size = BufferSize(2, tuned=True)
    drain(size)
    assert size.size == 4
    drain(size)
    assert size.size == 8


def test_it_does_not_grow_where_it_is_never_full() -> None:
    size = BufferSize(2, tuned=True)
    for _ in range(1000):
        size.asked(0)
    assert size.size == 2


def test_it_has_an_end() -> None:
    size = BufferSize(2, tuned=True)
    for _ in range(100):
        drain(size)
    assert size.size == 1024


def test_it_shrinks_when_it_is_always_more_than_half_full() -> None:
    size = BufferSize(2, tuned=True)
    for _ in range(3):
        drain(size)
    for _ in range(64):
        size.asked(12)
    assert size.size == 8
    for _ in range(63):
        size.asked(8)
    size.asked(3)
    assert size.size == 8
    for _ in range(64 * 10):
        size.asked(1024)
    assert size.size == 2


def test_a_size_that_was_asked_for_is_kept() -> None:
    size = BufferSize(3, tuned=False)
    for _ in range(200):
        drain(size)
    assert size.size == 3
