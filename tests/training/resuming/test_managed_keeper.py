from __future__ import annotations

from pathlib import Path

import pytest

import raydist as rd
from raydist.training.resuming.fit_checkpoints import ManagedKeeper


def test_it_restores_the_same_again(tmp_path: Path) -> None:
    progress = rd.State(epoch=3)
    with rd.CheckpointManager(rd.Checkpoint(progress=progress), tmp_path, 1) as manager:
        manager.save()
    progress.epoch = 0
    with rd.CheckpointManager(rd.Checkpoint(progress=progress), tmp_path, 1) as manager:
        keeper = ManagedKeeper(manager)
        found = keeper.restore()
        progress.epoch = 7
        assert keeper.restore() == found == str(tmp_path / "ckpt-1")
    assert progress.epoch == 3


def test_it_saves_when_it_is_to(tmp_path: Path) -> None:
    with rd.CheckpointManager(rd.Checkpoint(progress=rd.State()), tmp_path, None, checkpoint_interval=2) as manager:
        keeper = ManagedKeeper(manager, within_epochs=True, each_epoch=False)
        assert keeper.restore() is None
        for _ in range(5):
            keeper.after_execution(1)
        keeper.after_epoch({"loss": 0.5})
        manager.sync()
        assert [Path(path).name for path in manager.checkpoints] == ["ckpt-2", "ckpt-4"]


def test_an_epoch_that_was_not_validated_has_no_part_in_the_best(tmp_path: Path) -> None:
    checkpoint = rd.Checkpoint(progress=rd.State())
    with rd.CheckpointManager(checkpoint, tmp_path, None, best=("val_loss", "min")) as manager:
        keeper = ManagedKeeper(manager)
        for logs in ({"loss": 1.0}, {"loss": 2.0, "val_loss": 0.5}, {"loss": 3.0}):
            keeper.after_epoch(logs)
        manager.sync()
        assert Path(manager.best_checkpoint or "").name == "ckpt-2"
        with pytest.raises(rd.InvalidArgumentError, match=r"metrics must have 'val_loss', .* got loss, val_mae"):
            keeper.after_epoch({"loss": 1.0, "val_mae": 0.5})


def test_it_removes_what_it_saved_once_all_is_done(tmp_path: Path) -> None:
    with rd.CheckpointManager(rd.Checkpoint(progress=rd.State()), tmp_path / "kept", 2) as manager:
        keeper = ManagedKeeper(manager, delete=True)
        keeper.after_epoch({})
        keeper.finish()
        assert not (tmp_path / "kept").exists()
