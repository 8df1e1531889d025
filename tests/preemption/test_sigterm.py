"""SIGTERM becomes a note; handlers that were there are kept."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from raydist.preemption.sigterm import SigtermNote


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
    note = SigtermNote(lambda: noted.append(1))
    assert note.install()
    terminate()
    terminate()
    assert (noted, ran) == ([1], [])
    note.run_found()
    assert ran == [signal.SIGTERM]
    note.restore()
    note.restore()
    terminate()
    assert ran == [signal.SIGTERM] * 2
    signal.signal(signal.SIGTERM, before)


def rays(number: int, frame: FrameType | None) -> None:
    raise AssertionError("this ends the process")


def test_rays_handler_is_put_back_but_never_run() -> None:
    before, noted = signal.getsignal(signal.SIGTERM), list[int]()
    rays.__module__ = "ray._private.worker"
    note = SigtermNote(lambda: noted.append(1))
    note.install()
    signal.signal(signal.SIGTERM, rays)  # as ray.init does
    assert not note.is_installed
    assert note.install()
    terminate()
    note.run_found()
    assert noted == [1]
    note.restore()
    assert signal.getsignal(signal.SIGTERM) is rays
    signal.signal(signal.SIGTERM, before)


def test_only_the_main_thread_may_watch() -> None:
    note, said = SigtermNote(lambda: None), list[bool]()
    thread = threading.Thread(target=lambda: said.append(note.install()))
    thread.start()
    thread.join()
    assert said == [False]
    note.restore()
