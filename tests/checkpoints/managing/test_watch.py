"""A manager as it is told of steps."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import raydist as rd
from raydist.checkpoints.checkpoint import contents_of
from raydist.checkpoints.managing.saves import ManagedSaves
from raydist.checkpoints.managing.watch import ManagerWatch
from raydist.checkpoints.retention import Retention
from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.save_interval import SaveInterval


def made(directory: Path, checkpoint: rd.Checkpoint) -> ManagedSaves:
    run = RunDirectory(str(directory), "ckpt", Retention(2))
    return ManagedSaves(contents_of(checkpoint), run, SaveInterval(), None)


def test_what_was_drawn_for_a_step_that_did_not_begin_is_not_drawn(tmp_path: Path) -> None:
    data = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(6).batch(2))
    saves = made(tmp_path, rd.Checkpoint(data=data))
    watch = ManagerWatch(saves, 42)
    saves.run.take()
    watch.look()
    iterator = iter(data)
    next(iterator)
    watch.before_step(1)
    next(iterator)
    assert f"{tmp_path}/ckpt-0" in str(watch.save_to_leave("why", undone=2))
    saves.run.give_back()
    rd.Checkpoint(data=data).restore(tmp_path / "ckpt-0")
    assert [batch.tolist() for batch in data] == [[2, 3], [4, 5]]


def test_what_cannot_be_saved_is_said_and_does_not_keep_the_process(tmp_path: Path) -> None:
    saves = made(tmp_path, rd.Checkpoint(state=rd.State()))
    ended = ManagerWatch(saves, 7).save_to_leave("it is drained", undone=None)  # nobody has taken the directory
    assert ended.code == 7
    assert "it is drained. It could not be saved (FailedPreconditionError" in str(ended)
    assert str(ended).endswith("the last checkpoint is none.")


def test_it_does_not_keep_a_manager_that_was_dropped(tmp_path: Path) -> None:
    saves = made(tmp_path, rd.Checkpoint(state=rd.State()))
    watch = ManagerWatch(saves, 7)
    del saves
    gc.collect()
    assert str(watch.save_to_leave("why", undone=None)) == "This process is to end: why."
    assert watch.nodes() == set()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_an_iterator_of_its_own_goes_back_likewise(tmp_path: Path, num_steps: int) -> None:
    iterator = iter(rd.Dataset.range(6))
    next(iterator)
    saves = made(tmp_path, rd.Checkpoint(iterator=iterator))
    watch = ManagerWatch(saves, 42)
    saves.run.take()
    watch.look()
    for boundary in range(1, num_steps + 1):
        next(iterator)
        watch.before_step(boundary)
    next(iterator)
    watch.save_to_leave("why", undone=num_steps + 1)
    saves.run.give_back()
    again = iter(rd.Dataset.range(6))
    rd.Checkpoint(iterator=again).restore(tmp_path / "ckpt-0")
    assert int(next(again)) == 1 + num_steps
