from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have files of their own on Linux only")

_PROGRAM = """
import ctypes, os, threading

from raydist.actors.background_threads import put_behind

ready, over = threading.Barrier(3), threading.Event()
numbers = {}

def work(kind):
    if kind == "native":
        ctypes.CDLL(None).prctl(15, b"client.poll0", 0, 0, 0)  # PR_SET_NAME
    numbers[kind] = threading.get_native_id()
    ready.wait()
    over.wait()
    if kind == "native":
        child = threading.Thread(target=lambda: numbers.__setitem__("child", os.getpriority(os.PRIO_PROCESS, 0)))
        child.start()
        child.join()

threads = [threading.Thread(target=work, args=(kind,)) for kind in ("native", "python")]
for thread in threads:
    thread.start()
ready.wait()
before = os.getpriority(os.PRIO_PROCESS, 0)
count = put_behind()
nice = {kind: os.getpriority(os.PRIO_PROCESS, number) - before for kind, number in numbers.items()}
over.set()
for thread in threads:
    thread.join()
print(count, nice["native"], nice["python"], os.getpriority(os.PRIO_PROCESS, 0) - before, numbers["child"] - before)
"""


def test_threads_of_libraries_run_behind_those_of_python() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    count, native, python, first, child = map(int, done.stdout.split())
    assert count >= 1
    assert native == child > 0
    assert python == first == 0
