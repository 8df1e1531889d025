from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from raydist.core.errors import FailedPreconditionError
from raydist.core.fork_guard import OwningProcess, call_here, end_forked_child, note_inherited
from tests.forks import in_a_forked_child


def test_only_the_process_that_made_it_may_use_it() -> None:
    process = OwningProcess("This pool")
    process.require("used")

    def child() -> None:
        assert not process.is_this
        message = rf"This pool must be used by the process that made it \({os.getppid()}\), .*child {os.getpid()}"
        with pytest.raises(FailedPreconditionError, match=message):
            process.require("used")

    assert process.is_this
    assert in_a_forked_child(child) == 0


class Thing:
    """Wants to be told."""

    copies = 0

    def became_a_copy(self) -> None:
        self.copies += 1


def test_copies_are_told_and_nothing_is_kept_for_it() -> None:
    kept, dropped = Thing(), Thing()
    note_inherited(kept)
    note_inherited(dropped)
    del dropped
    gc.collect()

    def child() -> None:
        assert kept.copies == 1

    assert in_a_forked_child(child) == 0
    assert kept.copies == 0


@pytest.mark.parametrize(("error", "status"), [(None, 0), (KeyError("mine"), 1)])
def test_a_child_that_a_function_left_behind_ends(
    capfd: pytest.CaptureFixture[str], error: BaseException | None, status: int
) -> None:
    pid = os.getpid()
    end_forked_child(pid, error)  # not here

    def child() -> None:
        end_forked_child(pid, error)
        os._exit(9)

    assert in_a_forked_child(child) == status
    assert ("KeyError: 'mine'" in capfd.readouterr().err) == (error is not None)


def test_a_child_that_a_function_forks_does_not_come_back_from_it(tmp_path: Path) -> None:
    def fork(fails: bool) -> int:
        pid = os.fork()
        if pid == 0 and fails:
            raise KeyError("in the child")
        return pid

    for fails, status in ((False, 0), (True, 1)):
        pid = call_here(fork, fails)
        (tmp_path / f"{os.getpid()}-{fails}").touch()  # a child that came back would leave one, too
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(KeyError, match="mine"):
        call_here({}.__getitem__, "mine")
