"""SIGTERM becomes a note; handlers that were there are kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest

from raydist.cluster.preemption import SigtermHandler


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_it_is_noted_once_and_handlers_that_were_there_run_when_they_are_asked_to() -> None:
    before, ran, noted = signal.getsignal(signal.SIGTERM), list[int](), list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: ran.append(number))
    handler = SigtermHandler(lambda: noted.append(1))
    assert handler.install()
    terminate()
    terminate()
    assert (noted, ran) == ([1], [])
    handler.run_found()
    assert ran == [signal.SIGTERM]
    handler.restore()
    handler.restore()
    terminate()
    assert ran == [signal.SIGTERM] * 2
    signal.signal(signal.SIGTERM, before)


def rays(number: int, frame: FrameType | None) -> None:
    raise AssertionError("this ends the process")


def test_rays_handler_is_put_back_but_never_run() -> None:
    before, noted = signal.getsignal(signal.SIGTERM), list[int]()
    rays.__module__ = "ray._private.worker"
    handler = SigtermHandler(lambda: noted.append(1))
    handler.install()
    signal.signal(signal.SIGTERM, rays)  # as ray.init does
    assert not handler.is_installed
    assert handler.install()
    terminate()
    handler.run_found()
    assert noted == [1]
    handler.restore()
    assert signal.getsignal(signal.SIGTERM) is rays
    signal.signal(signal.SIGTERM, before)


def test_what_another_thread_restores_is_there_when_it_comes() -> None:
    before, ran, noted = signal.getsignal(signal.SIGTERM), list[int](), list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: ran.append(number))
    handler = SigtermHandler(lambda: noted.append(1))
    handler.install()
    in_thread(handler.restore)
    terminate()
    assert (noted, ran) == ([], [signal.SIGTERM])
    handler.install()
    in_thread(handler.restore)
    assert in_thread(handler.install)  # it watches again: nothing had to be done for it
    terminate()
    assert (noted, ran) == ([1], [signal.SIGTERM])
    handler.restore()
    assert not handler.is_installed
    signal.signal(signal.SIGTERM, before)


def in_thread(do: Callable[[], bool | None]) -> bool | None:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(do).result(10)


def test_only_the_main_thread_may_watch() -> None:
    handler = SigtermHandler(lambda: None)
    assert in_thread(handler.install) is False
    handler.restore()
