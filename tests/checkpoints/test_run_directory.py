"""Which checkpoints there are in a run's directory, which go, and that one process writes."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from raydist.checkpoints.checkpoint import Checkpoint
from raydist.checkpoints.latest import latest_checkpoint
from raydist.checkpoints.retention import Best, KeptCheckpoint, Retention
from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.saved_ones import DETAILS
from raydist.checkpoints.sharing.started_save import start_save
from raydist.checkpoints.state import State
from raydist.errors import FailedPreconditionError
from raydist.failpoints import installed
from raydist.pipelines.stored.directory_files import LocalFiles

KEEPS_TWO = Retention(2, None, Best.parse(("loss", "min")))


def save(run: RunDirectory, number: int, loss: float) -> KeptCheckpoint:
    kept = run.begin(number, {"loss": loss})
    contents = Checkpoint(state=State(number=number))._contents
    run.save(kept, start_save(contents, run.files_of(kept), {DETAILS: run.details_of(kept)}).write)
    return kept


def names(paths: list[str]) -> list[str]:
    return [path.rpartition("/")[2] for path in paths]


def test_the_newest_stay_and_the_best_beyond_them(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path), "ckpt", KEEPS_TWO)
    run.take()
    for number, loss in enumerate((3.0, 1.0, 2.0, 4.0)):
        save(run, number, loss)
    assert names(run.newest()) == ["ckpt-2", "ckpt-3"]
    assert run.best() == f"{tmp_path}/ckpt-1"
    assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == ["ckpt-1", "ckpt-2", "ckpt-3"]
    run.give_back()
    assert names(run.newest()) == ["ckpt-2", "ckpt-3"]  # read from the directory now


def test_saves_are_newer_than_all_before_whoever_made_them(tmp_path: Path) -> None:
    first = RunDirectory(str(tmp_path), "ckpt", KEEPS_TWO)
    first.take()
    before = save(first, 100, 1.0)
    first.give_back()
    second = RunDirectory(str(tmp_path), "ckpt", KEEPS_TWO)
    second.take()
    assert second.begin(1, {}).generation > before.generation
    assert second.details_of(before)["began"] == before.saved_at
    second.give_back()


def test_saves_of_another_name_are_newer_too(tmp_path: Path) -> None:
    for name, numbers in (("pretrain", (1, 2, 3)), ("finetune", (1,))):
        run = RunDirectory(str(tmp_path), name, KEEPS_TWO)
        run.take()
        for number in numbers:
            save(run, number, 1.0)
        run.give_back()
    assert latest_checkpoint(str(tmp_path)) == f"{tmp_path}/finetune-1"


def test_one_at_a_time_may_write(tmp_path: Path) -> None:
    run, other = (RunDirectory(str(tmp_path), "ckpt", KEEPS_TWO) for _ in range(2))
    assert not run.is_ours
    run.take()
    assert run.is_ours
    run.require_ours()
    with pytest.raises(FailedPreconditionError):
        other.take()
    run.give_back()
    other.take()
    other.give_back()


def test_what_cannot_be_removed_now_goes_with_a_later_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDirectory(str(tmp_path), "ckpt", KEEPS_TWO)
    run.take()
    for number in range(2):
        save(run, number, 1.0)
    with mock.patch.object(LocalFiles, "remove", side_effect=PermissionError("the store takes, but removes nothing")):
        for number in (2, 3, 4):
            save(run, number, 0.5)
    assert names(run.newest()) == ["ckpt-3", "ckpt-4"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3  # one try a save
    assert all("could not be removed: PermissionError: the store takes" in each for each in said)
    save(run, 1, 2.0)  # this one is kept now
    assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == ["ckpt-1", "ckpt-2", "ckpt-4"]
    run.give_back()


def test_what_has_failed_but_is_there_goes_with_the_next_save(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path), "ckpt", KEEPS_TWO)
    run.take()

    def fail(point: str) -> None:
        if point == "checkpoint.after_rename":
            raise OSError("the answer was lost")

    save(run, 1, 1.0)
    for number in (1, 2):
        with installed(fail), pytest.raises(OSError, match="lost"):
            save(run, number, 2.0)
    assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == ["ckpt-1", "ckpt-2"]
    save(run, 3, 3.0)
    assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == ["ckpt-1", "ckpt-3"]
    run.give_back()
