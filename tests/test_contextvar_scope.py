"""A context variable inside of a block."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest

from raydist.core.contextvar_scope import contextvar_scope

COLOR: ContextVar[str] = ContextVar("COLOR", default="white")


def test_the_innermost_block_counts_and_leaves_what_was() -> None:
    with contextvar_scope(COLOR, "red"):
        with contextvar_scope(COLOR, "blue"):
            assert COLOR.get() == "blue"
        assert COLOR.get() == "red"
    assert COLOR.get() == "white"


def test_an_error_leaves_what_was() -> None:
    with pytest.raises(ZeroDivisionError), contextvar_scope(COLOR, "red"):
        raise ZeroDivisionError
    assert COLOR.get() == "white"


def test_other_threads_do_not_see_it() -> None:
    seen: list[str] = []
    with contextvar_scope(COLOR, "red"):
        thread = threading.Thread(target=lambda: seen.append(COLOR.get()))
        thread.start()
        thread.join(10)
    assert seen == ["white"]
