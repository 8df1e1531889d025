from __future__ import annotations

import ctypes
import platform
import sys
import threading
import time

import pytest

from raydist.collectives.shared_memory.control import Futex, why_unsupported


def make_bell() -> tuple[ctypes.c_uint32, Futex]:
    word = ctypes.c_uint32(0)
    return word, Futex(ctypes.addressof(word))


def test_ringing_adds_one_for_everybody_who_rings() -> None:
    word, futex = make_bell()

    def ring_often() -> None:
        for _ in range(1000):
            futex.ring()

    ringers = [threading.Thread(target=ring_often) for _ in range(4)]
    for ringer in ringers:
        ringer.start()
    for ringer in ringers:
        ringer.join()
    assert futex.count() == word.value == 4000


def test_ringing_wakes_all_sleepers() -> None:
    word, futex = make_bell()
    sleepers = [threading.Thread(target=futex.sleep, args=(0, 30.0)) for _ in range(3)]
    for sleeper in sleepers:
        sleeper.start()
    time.sleep(0.05)
    futex.ring()
    for sleeper in sleepers:
        sleeper.join(5.0)
    assert not any(sleeper.is_alive() for sleeper in sleepers)
    assert word.value == 1


def test_nobody_sleeps_through_a_ring_before() -> None:
    _word, futex = make_bell()
    futex.ring()
    start = time.monotonic()
    futex.sleep(0, 30.0)
    assert time.monotonic() - start < 5.0


def test_a_sleep_ends() -> None:
    word, futex = make_bell()
    start = time.monotonic()
    futex.sleep(0, 0.05)
    futex.sleep(0, -1.0)
    futex.yield_core()
    assert 0.04 < time.monotonic() - start < 5.0
    assert word.value == 0


def test_each_sleep_keeps_to_its_own_limit() -> None:
    _, futex = make_bell()
    took = []
    for seconds in (0.01, 0.01, 0.2, 0.01, 0.0):
        begin = time.monotonic()
        futex.sleep(0, seconds)
        took.append(time.monotonic() - begin)
    assert took[2] >= 0.19
    assert min(took[0], took[1], took[3]) >= 0.009
    assert took[4] < 0.19


@pytest.mark.parametrize(("system", "machine"), [("linux", "aarch64"), ("darwin", "x86_64")])
def test_machines_that_promise_less(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    assert why_unsupported() is None
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert why_unsupported() == f"it needs Linux on x86-64, and this is {system} on {machine}"
