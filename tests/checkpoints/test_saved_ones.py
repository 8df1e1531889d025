"""Which checkpoints are in a directory, and removing them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raydist.checkpoints.checkpoint import Checkpoint
from raydist.checkpoints.manager import CheckpointManager
from raydist.checkpoints.new_files import MANIFEST_NAME
from raydist.checkpoints.removal import remove_checkpoint, remove_what_was_killed
from raydist.checkpoints.saved_ones import as_metrics, checkpoint_path, find_checkpoints, folders_of
from raydist.checkpoints.state import State
from raydist.errors import InvalidArgumentError
from raydist.failpoints import installed
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


def test_removing_begins_with_the_manifest(filled: Path) -> None:
    passed: list[tuple[str, bool]] = []
    manifest = filled / "ckpt-5" / MANIFEST_NAME
    with installed(lambda name: passed.append((name, manifest.exists()))):
        remove_checkpoint(directory_files(str(filled / "ckpt-5")))
    assert passed == [
        ("retention.before_manifest", True),
        ("retention.after_manifest", False),
        ("retention.after_files", False),
    ]
    assert not manifest.parent.exists()


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
