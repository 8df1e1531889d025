from __future__ import annotations

import subprocess
import sys

import pytest

# The thread is in C++ most of the time, and takes the interpreter's lock on its way back, many times a second.
_MAPPED = """
import sys
import torch
import raydist as rd

def products(x):
    a = torch.ones(200, 200)
    for _ in range(20):
        a = a @ a * 1e-3
    return a.numpy()[0]

numbers = rd.Dataset.range(100_000)
if sys.argv[1] == "prefetch":
    dataset = numbers.map(products).prefetch(8)
elif sys.argv[1] == "threads":
    options = rd.Options()
    options.threading.private_threadpool_size = 2
    dataset = numbers.map(products).with_options(options)
else:
    dataset = numbers.interleave(lambda x: rd.Dataset.range(100).map(products), num_parallel_calls=2)
iterator = iter(dataset)
next(iterator)
if sys.argv[2] == "dropped":
    del iterator
sys.exit(3)
"""

_ENDS = """
import threading, time
from raydist.core.thread_shutdown import end_at_exit

def work(told, seconds):
    told.wait(20.0)
    time.sleep(seconds)
    print("ended", flush=True)

for seconds in (0.2, 0.4):
    told = threading.Event()
    thread = threading.Thread(target=work, args=(told, seconds), daemon=True)
    end_at_exit(thread, told.set)
    thread.start()
over = threading.Thread(target=print, args=("over",), daemon=True)
end_at_exit(over, lambda: print("was told"))
over.start()
over.join()
"""

_HELD_UP = """
import threading
from raydist.core import thread_shutdown

thread_shutdown._LIMIT_S = 0.5
threads = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(2)]
for thread in threads:
    thread_shutdown.end_at_exit(thread, lambda: None)
    thread.start()
"""


def run(program: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("state", ["kept", "dropped"])
@pytest.mark.parametrize("where", ["prefetch", "threads", "interleave"])
def test_a_program_may_end_in_the_middle_of_a_pipeline(where: str, state: str) -> None:
    done = run(_MAPPED, where, state)
    assert (done.returncode, done.stderr) == (3, "")


def test_threads_are_told_to_end_and_awaited() -> None:
    done = run(_ENDS)
    assert (done.returncode, done.stdout) == (0, "over\nended\nended\n")


def test_threads_that_are_held_up_are_left_behind() -> None:
    done = run(_HELD_UP)
    assert (done.returncode, done.stderr) == (0, "")
