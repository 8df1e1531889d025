from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from raydist.testing.resuming.lives import is_readable


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its two ends, under numbers that `select` would refuse."""
    low = os.pipe()
    with contextlib.ExitStack() as stack:
        high = tuple(os.dup2(end, 1500 + place) for place, end in enumerate(low))
        for end in (*low, high[0]):
            stack.callback(os.close, end)
        with contextlib.suppress(OSError):
            yield high[0], high[1]


def test_what_was_written_is_there(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    assert not is_readable(reading, 0.01)
    os.write(writing, b"x")
    assert is_readable(reading, 0.0)
    os.close(writing)
