"""What can be asked of a run's directory; the rest is tested by tests/checkpoints/test_manager.py."""

from __future__ import annotations

from pathlib import Path

import raydist as rd
from raydist.checkpoints.manager import KeptCheckpoints
from raydist.checkpoints.retention import Best, Retention
from raydist.checkpoints.run_directory import RunDirectory
from raydist.checkpoints.save_interval import SaveInterval


def test_it_is_read_from_the_directory_whoever_writes_there(tmp_path: Path) -> None:
    plain = KeptCheckpoints(RunDirectory(str(tmp_path), "ckpt", Retention(1)), SaveInterval())
    kept = KeptCheckpoints(
        RunDirectory(str(tmp_path), "ckpt", Retention(1, None, Best("loss", "min"))), SaveInterval(5, 2.5)
    )
    assert (kept.checkpoints, kept.latest_checkpoint, kept.best_checkpoint) == ([], None, None)
    with rd.CheckpointManager(rd.Checkpoint(state=rd.State()), tmp_path, 2, best=("loss", "min")) as manager:
        for loss in (1.0, 0.5, 2.0):
            manager.save(metrics={"loss": loss})
    assert (kept.checkpoint_interval, kept.interval_s) == (5, 2.5)
    assert kept.directory == str(tmp_path)
    assert kept.checkpoints == [f"{tmp_path}/ckpt-3"]
    assert kept.latest_checkpoint == f"{tmp_path}/ckpt-3"
    assert (kept.best_metric, kept.best_checkpoint) == ("loss", f"{tmp_path}/ckpt-2")
    assert (plain.best_metric, plain.best_checkpoint) == (None, None)
