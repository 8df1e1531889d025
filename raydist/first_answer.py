"""Blocking calls that may get stuck and cannot be interrupted: begun again beside the stuck one, until one answers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from raydist.ending_threads import end_at_exit

__all__ = ["first_answer"]

_FIRST_PAUSE_S = 0.25

_Answer = TypeVar("_Answer")


def first_answer(call: Callable[[float], _Answer], timeout_s: float, *, name: str) -> _Answer:
    """What the first of several equal calls returns, or raises. Blocking: at most `timeout_s` seconds.

    A second call begins after 0.25 s, a third 0.5 s later, and so on at twice the distance; whatever the others find
    is dropped. Each runs in a thread of its own, which lasts as long as its call; at the process's end they have
    15 s more.

    Args:
        call: Gets the seconds that are left. Must be of no effect where its answer is dropped.
        name: Of the threads.

    Raises:
        TimeoutError: None answered.

    >>> first_answer(lambda left_s: left_s <= 5.0, 5.0, name="example")
    True
    """
    answers: queue.SimpleQueue[Future[_Answer]] = queue.SimpleQueue()
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while (left_s := deadline - time.monotonic()) > 0:
        thread = threading.Thread(target=_answer, args=(call, left_s, answers), name=name, daemon=True)
        end_at_exit(thread, _nothing)
        thread.start()
        try:
            return answers.get(timeout=min(pause_s, left_s)).result()
        except queue.Empty:
            pause_s *= 2
    raise TimeoutError(f"No call of {name!r} returned within {timeout_s} s.")


def _answer(call: Callable[[float], _Answer], left_s: float, answers: queue.SimpleQueue[Future[_Answer]]) -> None:
    answer: Future[_Answer] = Future()
    try:
        answer.set_result(call(left_s))
    except BaseException as error:
        answer.set_exception(error)
    answers.put(answer)


def _nothing() -> None:
    """A call that is stuck cannot be told to end."""
