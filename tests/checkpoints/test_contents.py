"""What a checkpoint holds beside the objects that it was given: the global step."""

from __future__ import annotations

from pathlib import Path

import pytest

import raydist as rd
from raydist.checkpoints.saved_checkpoint import open_checkpoint
from raydist.context import training_strategy
from raydist.pipelines.stored.directory_files import directory_files


def at_step(count: int) -> tuple[rd.OneDeviceStrategy, rd.Checkpoint]:
    """A program's strategy and checkpoint, as it has trained on so many batches."""
    strategy = rd.OneDeviceStrategy("cpu")
    with strategy.scope():
        checkpoint = rd.Checkpoint(progress=rd.State(epoch=count))
        if count:
            rd.get_global_step()  # made by whoever asks first
        for _ in range(count):
            strategy.run(lambda: rd.get_global_step().add_(1))
    return strategy, checkpoint


def step_of(strategy: rd.OneDeviceStrategy) -> int:
    with strategy.scope():
        return int(rd.get_global_step())


def names_in(path: str) -> list[str]:
    return sorted(open_checkpoint(directory_files(path)).manifest.objects)


def test_the_global_step_is_in_every_checkpoint(tmp_path: Path) -> None:
    _, checkpoint = at_step(3)
    path = checkpoint.save(tmp_path / "saved")
    assert names_in(path) == ["global_step", "progress"]
    strategy, fresh = at_step(0)
    fresh.restore(path)
    assert step_of(strategy) == 3
    assert step_of(at_step(0)[0]) == 0, "it is of the one strategy alone"


def test_a_program_that_does_not_count_saves_none(tmp_path: Path) -> None:
    path = at_step(0)[1].save(tmp_path / "saved")
    assert names_in(path) == ["progress"]
    strategy, counted = at_step(2)
    counted.restore(path)
    assert step_of(strategy) == 2, "there is none to go back to"


def test_of_chosen_objects_alone_it_is_not_part(tmp_path: Path) -> None:
    path = at_step(3)[1].save(tmp_path / "saved")
    strategy, checkpoint = at_step(1)
    checkpoint.restore(path, only="progress")
    assert step_of(strategy) == 1


def test_an_object_of_that_name_is_the_programs_own(tmp_path: Path) -> None:
    strategy, _ = at_step(3)
    with strategy.scope():
        checkpoint = rd.Checkpoint(global_step=rd.State(value=7))
    path = checkpoint.save(tmp_path / "saved")
    again = rd.State(value=0)
    rd.Checkpoint(global_step=again).restore(path)
    assert (again.value, step_of(strategy)) == (7, 3)


def test_where_nobody_counts_it_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = at_step(3)[1].save(tmp_path / "saved")
    monkeypatch.setattr(training_strategy, "_living", set)
    progress = rd.State(epoch=0)
    with pytest.warns(RuntimeWarning, match="Make the Checkpoint under the scope"):
        rd.Checkpoint(progress=progress).restore(path)
    assert progress.epoch == 3
