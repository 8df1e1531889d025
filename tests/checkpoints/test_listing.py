"""Which checkpoints are there, which stay, and when the next one is due."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import raydist as rd
from raydist.checkpoints.checkpoint import Checkpoint
from raydist.checkpoints.listing import (
    Best,
    KeptCheckpoint,
    Retention,
    SaveInterval,
    as_metrics,
    checkpoint_path,
    checkpoints_iterator,
    find_checkpoints,
    folders_of,
)
from raydist.checkpoints.manager import CheckpointManager
from raydist.checkpoints.object_state import State
from raydist.checkpoints.run_directory import remove_what_was_killed
from raydist.checkpoints.tensor_file import MANIFEST_NAME
from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.stored.directory_files import directory_files


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    with CheckpointManager(Checkpoint(state=State(a=1)), tmp_path, None) as manager:
        for number in (5, 100, 7):
            manager.save(checkpoint_number=number, metrics={"loss": number})
    return tmp_path


def names(path: Path, name: str | None = None) -> list[str]:
    return [each.kept.name for each in find_checkpoints(directory_files(str(path)), name)]


def test_they_come_in_the_order_of_their_saves(filled: Path) -> None:
    Checkpoint(state=State(a=1)).save(filled / "other-1")
    (filled / "ckpt-9").mkdir()
    (filled / "ckpt-x").mkdir()
    (filled / "ckpt-8").symlink_to(filled / "ckpt-7")
    assert names(filled) == ["other-1", "ckpt-5", "ckpt-100", "ckpt-7"]
    assert names(filled, "ckpt") == ["ckpt-5", "ckpt-100", "ckpt-7"]
    assert find_checkpoints(directory_files(str(filled)), "ckpt")[0].kept.metrics == {"loss": 5.0}


def test_a_damaged_one_comes_where_its_number_suggests(filled: Path) -> None:
    manifest = filled / "ckpt-7" / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes()[:-9])
    found = find_checkpoints(directory_files(str(filled)))
    assert [each.kept.name for each in found] == ["ckpt-5", "ckpt-7", "ckpt-100"]
    assert [each.damage is not None for each in found] == [False, True, False]


def test_unfinished_ones_of_this_name_are_removed(filled: Path) -> None:
    for name in ("ckpt-8", "other-8", "notes"):
        (filled / name).mkdir()
        (filled / name / "model.safetensors").write_bytes(b"half")
    remove_what_was_killed(directory_files(str(filled)), folders_of(directory_files(str(filled)), "ckpt"))
    assert sorted(os.listdir(filled)) == ["ckpt-100", "ckpt-5", "ckpt-7", "notes", "other-8"]


def test_paths_of_uris_keep_what_follows_the_path() -> None:
    assert checkpoint_path("s3://bucket/run/?token=1", "ckpt-1") == "s3://bucket/run/ckpt-1?token=1"


def test_metrics_are_numbers() -> None:
    with pytest.raises(InvalidArgumentError, match="names and numbers"):
        as_metrics({"loss": []})


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


def kept(*numbers: int, losses: dict[int, float] | None = None, every_s: float = 60.0) -> list[KeptCheckpoint]:
    return [
        KeptCheckpoint(f"ckpt-{n}", n, at, at * every_s, {"loss": losses[n]} if losses and n in losses else {})
        for at, n in enumerate(numbers)
    ]


def removed(rules: Retention, found: list[KeptCheckpoint]) -> list[int]:
    return [each.number for each in rules.to_remove(found, began=0.0)]


def test_the_newest_stay_by_the_order_of_saves_and_not_by_their_numbers() -> None:
    assert removed(Retention(2), kept(100, 200, 3, 4)) == [100, 200]
    assert removed(Retention(None), kept(1, 2, 3)) == []


def test_the_best_stays_beside_the_newest() -> None:
    found = kept(1, 2, 3, 4, losses={1: 2.0, 2: 0.5, 3: 1.0, 4: float("nan")})
    assert removed(Retention(1, best=Best("loss", "min")), found) == [1, 3]
    assert removed(Retention(1, best=Best("loss", "max")), found) == [2, 3]
    assert removed(Retention(1, best=Best("accuracy", "max")), found) == [1, 2, 3]


def test_what_stays_for_good_is_the_same_whenever_one_looks() -> None:
    rules = Retention(1, keep_every_s=120)
    found: list[KeptCheckpoint] = []
    for each in kept(*range(8)):
        found = [*found, each]
        gone = rules.to_remove(found, began=0.0)
        found = [other for other in found if other not in gone]
    assert [each.number for each in found] == [2, 4, 6, 7]


def test_a_clock_that_goes_back_loses_nothing_new() -> None:
    found = [KeptCheckpoint("a-1", 1, 1, 1e9), KeptCheckpoint("a-2", 2, 2, 1e9 - 86400)]
    assert [each.number for each in Retention(1, keep_every_s=60).newest(found)] == [2]


@pytest.mark.parametrize("arguments", [{"max_to_keep": 0}, {"max_to_keep": 1.5}])
def test_what_keeps_nothing_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a number"):
        Retention(**arguments)


@pytest.mark.parametrize("best", ["loss", ("loss",), ("loss", "least"), (1, "min")])
def test_best_is_a_metric_and_a_direction(best: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="best must be"):
        Best.parse(best)


@pytest.mark.parametrize(
    ("interval", "step", "since", "seconds", "due"),
    [
        (SaveInterval(), 1, 1, 0.0, True),
        (SaveInterval(steps=3), 3, 1, 1e6, False),
        (SaveInterval(steps=3), 4, 1, 0.0, True),
        (SaveInterval(steps=3), 1, None, 0.0, True),
        (SaveInterval(seconds=10), 100, 1, 9.9, False),
        (SaveInterval(seconds=10), 100, None, 9.9, False),
        (SaveInterval(seconds=10), 2, 1, 10.0, True),
        (SaveInterval(steps=3, seconds=10), 2, 1, 10.0, True),
        (SaveInterval(steps=3, seconds=10), 4, 1, 0.0, True),
        (SaveInterval(steps=3, seconds=10), 2, 1, 1.0, False),
    ],
)
def test_steps_or_seconds(interval: SaveInterval, step: int, since: int | None, seconds: float, due: bool) -> None:
    assert interval.is_due(step, since_step=since, seconds=seconds) == due


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"steps": True}, {"seconds": -1}, {"seconds": "1"}])
def test_intervals_are_positive(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="> ?=? ?[01]"):
        SaveInterval(**arguments)
