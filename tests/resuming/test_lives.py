"""Processes of programs that are killed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raydist.errors import UnavailableError
from tests.resuming.lives import ForkedLives, FreshLives, Lives, TrialProgram, is_readable

SCRIPT = """
import os, sys, time
print(sys.argv[1], os.environ["SAID"], __name__, flush=True)
if sys.argv[1] == "sleep":
    time.sleep(60)
elif sys.argv[1] == "raise":
    raise KeyError("mine")
elif sys.argv[1] != "end":
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("make", [FreshLives, ForkedLives])
def test_a_life_prints_and_ends_or_is_killed(make: Callable[[], Lives], tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(SCRIPT)
    with make() as lives:
        for argument, code in (("end", 0), ("42", 42), ("raise", 1)):
            life = lives.begin(TrialProgram(script, (argument,)), {"SAID": "this"}, log)
            assert life.exit_code(60.0) == life.exit_code(0.0) == code
        life = lives.begin(TrialProgram(script, ("sleep",)), {"SAID": "that"}, log)
        assert life.exit_code(0.05) is None
        life.kill()
        assert life.exit_code(60.0) == -9
        life.kill()  # which has ended: no error
        life = lives.begin(TrialProgram(script, ("7",)), {"SAID": "last"}, log)
        time.sleep(0.5)  # it ends by itself, and nobody has asked for its code yet
        life.kill()
        assert life.exit_code(60.0) in (7, -9)
    said = log.read_text()
    assert said.startswith("end this __main__\n42 this __main__\nraise this __main__\nTraceback")
    assert "KeyError: 'mine'" in said
    lives.close()


def test_lives_end_with_who_started_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    forked = ForkedLives()
    life = forked.begin(TrialProgram(script, ("sleep",)), {"SAID": ""}, tmp_path / "log")
    zygote = forked._zygote
    assert zygote is not None
    zygote._process.kill()
    with pytest.raises(UnavailableError, match="must live, but it ended with code -9"):
        life.exit_code(60.0)
    forked.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its two ends, under numbers that `select` would refuse."""
    low = os.pipe()
    with contextlib.ExitStack() as stack:
        high = tuple(os.dup2(end, 1500 + place) for place, end in enumerate(low))
        for end in (*low, high[0]):
            stack.callback(os.close, end)
        with contextlib.suppress(OSError):
            yield high[0], high[1]


def test_what_was_written_is_there(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    assert not is_readable(reading, 0.01)
    os.write(writing, b"x")
    assert is_readable(reading, 0.0)
    os.close(writing)
