from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time

import pytest

from raydist.first_answer import first_answer


def test_returns_what_the_call_returns_and_raises_what_it_raises() -> None:
    assert first_answer(lambda _: "answer", 5.0, name="test") == "answer"
    with pytest.raises(ZeroDivisionError):
        first_answer(lambda _: 1 / 0, 5.0, name="test")


def test_a_call_that_is_stuck_is_overtaken_by_the_next() -> None:
    calls, released = itertools.count(), threading.Event()

    def stuck_once(left_s: float) -> tuple[int, float]:
        number = next(calls)
        if number == 0:
            released.wait(30.0)
        return number, left_s

    try:
        number, left_s = first_answer(stuck_once, 20.0, name="test")
    finally:
        released.set()
    assert number == 1
    assert left_s <= 19.75


def test_calls_that_are_all_stuck_end_with_the_limit() -> None:
    released, begun = threading.Event(), []

    def stuck(left_s: float) -> None:
        begun.append(left_s)
        released.wait(30.0)

    began = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match="'test'"):
            first_answer(stuck, 1.0, name="test")
    finally:
        released.set()
    assert 1.0 <= time.monotonic() - began < 5.0
    assert len(begun) == 3


def test_without_time_nothing_is_called() -> None:
    with pytest.raises(TimeoutError):
        first_answer(lambda _: pytest.fail("was called"), 0.0, name="test")


def test_a_process_does_not_end_under_a_call_that_was_overtaken() -> None:
    program = """
import os, threading, time
from raydist.first_answer import first_answer

first = threading.Lock()

def call(left_s):
    if first.acquire(blocking=False):
        time.sleep(1.5)
        os.write(1, b"late")

first_answer(call, 20.0, name="test")
os.write(1, b"first, then ")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "first, then late"
