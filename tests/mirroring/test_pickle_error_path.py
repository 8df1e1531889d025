"""Naming what cannot be pickled."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from raydist.mirroring.step_pickler import pickle_error_path

LOCK = threading.Lock()


def can_pickle(obj: Any) -> bool:
    try:
        cloudpickle.dumps(obj)
    except TypeError:
        return False
    return True


class Holder:
    def __init__(self) -> None:
        self.inner = {"lock": LOCK}

    def method(self) -> None:
        return None


@dataclasses.dataclass(slots=True)
class Slotted:
    lock: Any


def closure() -> Callable[[], object]:
    lock = LOCK
    return lambda: lock


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (closure(), "closure variable 'lock' of <lambda>: _thread.lock"),
        (lambda x=LOCK: x, "a default of <lambda>: _thread.lock"),
        (lambda *, x=LOCK: x, "default of 'x' of <lambda>: _thread.lock"),
        (Holder(), "attribute 'inner' of Holder, ['lock']: _thread.lock"),
        (Holder().method, "self of Holder.method, attribute 'inner' of Holder, ['lock']: _thread.lock"),
        (functools.partial(len, [LOCK]), "arguments of a partial, [0], [0]: _thread.lock"),
        ([Slotted(LOCK)], "[0], attribute 'lock' of Slotted: _thread.lock"),
        (LOCK, "the object itself: _thread.lock"),
    ],
)
def test_way(obj: Any, message: str) -> None:
    assert pickle_error_path(obj, can_pickle) == message


def test_global() -> None:
    assert pickle_error_path(lambda: LOCK, lambda obj: obj is not LOCK) == "global 'LOCK' of <lambda>: _thread.lock"


def test_loop_ends() -> None:
    loop: list[Any] = [LOCK]
    loop.insert(0, loop)
    assert pickle_error_path(loop, can_pickle) == "[1]: _thread.lock"
