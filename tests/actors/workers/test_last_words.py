from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raydist.actors.workers.worker import LastWords, leave_words

PROGRAM = """
import ctypes, os, sys, time
from raydist.actors.workers.worker import leave_words
assert leave_words(sys.argv[1])
print("ready", flush=True)
{end}
"""


def words_of(end: str) -> str:
    words = LastWords()
    assert words.path is not None
    subprocess.run([sys.executable, "-c", PROGRAM.format(end=end), words.path], check=False, capture_output=True)
    return words.read()


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("ctypes.string_at(0)", "Fatal Python error: Segmentation fault"),
        ("os.abort()", "Fatal Python error: Aborted"),
        ("os._exit(3)", "os._exit(3)"),
        ("if os.fork() == 0: os._exit(3)\nos.wait()", ""),
        ("pass", ""),
    ],
)
def test_a_process_that_ends_itself_says_how(end: str, expected: str) -> None:
    assert words_of(end) == expected


def test_a_process_that_is_killed_says_nothing() -> None:
    words = LastWords()
    command = [sys.executable, "-c", PROGRAM.format(end="time.sleep(60)"), words.path or ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert words.read() == ""


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "file"
    other.write_text("")
    with other.open() as file:
        assert not leave_words(f"/proc/{os.getpid()}/fd/{file.fileno()}")
    assert not leave_words("/proc/0/fd/0")
    assert not leave_words(None)


def test_a_file_is_closed_with_its_object() -> None:
    words = LastWords()
    path = words.path or ""
    assert os.path.exists(path)
    del words
    gc.collect()
    assert not os.path.lexists(path)
