"""Scripts that share a process are told apart, and none takes the others with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shared_scripts import Scripts
from tests.test_watched_program import HANGS, time_is_over_on_a_signal


@pytest.fixture
def runner() -> Iterator[Scripts]:
    made = Scripts(os.environ)
    yield made
    made.end()


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_each_has_its_arguments_and_its_output(runner: Scripts, tmp_path: Path) -> None:
    path = script(tmp_path, "import os, sys; print(os.getpid(), sys.argv[1:])")
    (pid, *first), (same, *second) = (runner.run(path, argument).split() for argument in ("a", "b"))
    assert (first, second, pid) == (["['a']"], ["['b']"], same)


def test_one_that_fails_or_dies_is_an_error_and_the_next_one_runs(runner: Scripts, tmp_path: Path) -> None:
    for text, said in (("1 / 0", "'1'.*ZeroDivisionError"), ("import os; os._exit(0)", "''"), ("exit(2)", "'2'")):
        with pytest.raises(AssertionError, match=f"(?s)ended with {said}"):
            runner.run(script(tmp_path, text))
    assert "told" in runner.run(script(tmp_path, "import sys; print('told', file=sys.stderr); exit(2)"), status=2)
    assert runner.run(script(tmp_path, "print('well')")) == "well\n"


def test_one_that_hangs_says_where(runner: Scripts, tmp_path: Path) -> None:
    with time_is_over_on_a_signal(), pytest.raises(AssertionError, match="(?s)in time.*in waits_for_nobody"):
        runner.run(script(tmp_path, HANGS))
    with pytest.raises(AssertionError, match="had not ended in time"):
        runner.run(script(tmp_path, "import time; time.sleep(99)"), limit_s=0.1)
