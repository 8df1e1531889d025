"""The global step in checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import raydist as rd
from raydist.checkpoints.manifest import open_checkpoint
from raydist.context import current
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


def test_the_global_step_is_in_every_checkpoint_of_a_program_that_has_one(tmp_path: Path) -> None:
    path = at_step(3)[1].save(tmp_path / "saved")
    assert names_in(path) == ["global_step", "progress"]
    strategy, fresh = at_step(0)
    fresh.restore(path)
    assert step_of(strategy) == 3
    assert step_of(at_step(0)[0]) == 0, "it is of the one strategy alone"
    path = at_step(0)[1].save(tmp_path / "none")
    assert names_in(path) == ["progress"]
    strategy, counted = at_step(2)
    counted.restore(path)
    assert step_of(strategy) == 2, "there is none to go back to"


def test_the_global_step_is_restored_before_or_after_its_first_use(tmp_path: Path) -> None:
    def program(count: int) -> tuple[rd.OneDeviceStrategy, rd.Checkpoint]:
        strategy, _ = at_step(count)
        with strategy.scope():
            return strategy, rd.Checkpoint(model=torch.nn.Linear(1, 1), gradients=True)

    for saved in (0, 2):
        path = program(saved)[1].save(tmp_path / f"saved-{saved}")
        for count in (0, 1):
            strategy, checkpoint = program(count)
            checkpoint.restore(path)
            assert step_of(strategy) == (saved or count), (saved, count)


def test_an_object_of_the_program_named_global_step_wins(tmp_path: Path) -> None:
    strategy, _ = at_step(3)
    with strategy.scope():
        checkpoint = rd.Checkpoint(global_step=rd.State(value=7))
    path = checkpoint.save(tmp_path / "saved")
    again = rd.State(value=0)
    rd.Checkpoint(global_step=again).restore(path)
    assert (again.value, step_of(strategy)) == (7, 3)


def test_an_unused_global_step_is_skipped_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = at_step(3)[1].save(tmp_path / "saved")
    monkeypatch.setattr(current, "_living", set)
    progress = rd.State(epoch=0)
    with pytest.warns(RuntimeWarning, match="Make the Checkpoint under the scope"):
        rd.Checkpoint(progress=progress).restore(path)
    assert progress.epoch == 3


def with_model(count: int) -> tuple[rd.OneDeviceStrategy, rd.Checkpoint]:
    """As `at_step`, but the checkpoint is made outside of the scope and has a module of it."""
    strategy, _ = at_step(count)
    with strategy.scope():
        model = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    return strategy, rd.Checkpoint(model=model)


def test_the_global_step_is_from_the_strategy_of_the_modules(tmp_path: Path) -> None:
    (one, first), (other, second) = with_model(3), with_model(5)
    assert names_in(first.save(tmp_path / "first")) == ["global_step", "model"]
    second.save(tmp_path / "second")
    again, fresh = with_model(0)
    for path, step in ((tmp_path / "first", 3), (tmp_path / "second", 5)):
        fresh.restore(path)
        assert step_of(again) == step
    assert (step_of(one), step_of(other)) == (3, 5)


def test_a_closed_strategy_restores_the_global_step_it_had(tmp_path: Path) -> None:
    path = with_model(3)[1].save(tmp_path / "saved")
    counted, checkpoint = with_model(1)
    counted.close()
    checkpoint.restore(path)
    assert int(counted._make_counter().value) == 3
    closed, checkpoint = with_model(0)
    closed.close()
    with pytest.raises(
        rd.FailedPreconditionError, match="is closed and can't make its global step, for which nobody asked while"
    ):
        checkpoint.restore(path)
    checkpoint.restore(path, only="model")
