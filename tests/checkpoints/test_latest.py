"""Reading what another process writes."""

from __future__ import annotations

from pathlib import Path

import raydist as rd
from raydist.checkpoints.latest import checkpoints_iterator


def test_the_latest_is_the_one_saved_last(tmp_path: Path) -> None:
    assert rd.latest_checkpoint(tmp_path / "missing") is None
    with rd.CheckpointManager(rd.Checkpoint(progress=rd.State(a=1)), tmp_path, None) as manager:
        for number in (5, 100, 7):
            manager.save(checkpoint_number=number)
    assert rd.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-7")


def test_every_new_one_comes_once_and_those_in_between_may_be_left_out(tmp_path: Path) -> None:
    with rd.CheckpointManager(rd.Checkpoint(progress=rd.State(a=1)), tmp_path, 1) as manager:
        manager.save()
        manager.sync()
        found = checkpoints_iterator(tmp_path, timeout=0)
        assert next(found) == str(tmp_path / "ckpt-1")
        manager.save()
        manager.save()
        manager.sync()
        assert list(found) == [str(tmp_path / "ckpt-3")]


def test_it_waits_for_the_next_one(tmp_path: Path) -> None:
    with rd.CheckpointManager(rd.Checkpoint(progress=rd.State(a=1)), tmp_path, 1) as manager:
        asked: list[int] = []

        def save_then() -> bool:
            asked.append(1)
            if len(asked) == 1:
                manager.save()
                manager.sync()
            return len(asked) > 1

        found = checkpoints_iterator(tmp_path, timeout=0.05, timeout_fn=save_then)
        assert list(found) == [str(tmp_path / "ckpt-1")]
        assert len(asked) == 2
