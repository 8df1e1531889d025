from __future__ import annotations

import ctypes
import threading
import time

from raydist.channels.sleeper import LOOK_S, Sleeper
from raydist.collectives.shared_memory.control import Bell


def test_a_sleeper_wakes_for_its_bell_and_in_time_to_look() -> None:
    word = ctypes.c_uint32(0)
    bell = Bell(ctypes.addressof(word))
    sleeper = Sleeper(bell)
    seen = sleeper.count()
    began = time.monotonic()
    sleeper.wait(seen, 10)
    assert time.monotonic() - began < 10 * LOOK_S
    ringer = threading.Timer(0.05, bell.ring)
    ringer.start()
    while sleeper.count() == seen:
        sleeper.wait(seen, 10)
    ringer.join(10)
    sleeper.wait(seen, 10)  # rung since: at once
    assert sleeper.count() == seen + 1
