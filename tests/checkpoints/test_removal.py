from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

import raydist as rd
from raydist.checkpoints.capture import save_capture
from raydist.checkpoints.checkpoint import contents_of
from raydist.checkpoints.removal import remove_checkpoint, remove_what_was_killed
from raydist.checkpoints.saved_checkpoint import open_checkpoint
from raydist.failpoints import installed
from raydist.pipelines.stored.directory_files import DirectoryFiles, directory_files


@pytest.fixture(params=["local", "remote"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> DirectoryFiles:
    found = directory_files(str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run")
    found.make()
    return found


class KilledError(BaseException):
    """Stands for SIGKILL: what runs behind it in this process is none of the killed one's."""


def save(root: DirectoryFiles, name: str, number: int) -> DirectoryFiles:
    capture = contents_of(rd.Checkpoint(progress=rd.State(number=number), net=rd.Mean())).capture()
    save_capture(capture, root.inside(name))
    return root.inside(name)


def test_removing_begins_with_the_manifest(root: DirectoryFiles) -> None:
    directory = save(root, "ckpt-1", 1)
    seen: list[tuple[str, bool, int]] = []
    with installed(lambda point: seen.append((point, directory.exists("manifest.json"), len(directory.names())))):
        remove_checkpoint(directory)
    assert seen == [
        ("retention.before_manifest", True, 2),
        ("retention.after_manifest", False, 1),
        ("retention.within_files", False, 0),
        ("retention.after_files", False, 0),
    ]
    assert root.folders() == []
    remove_checkpoint(directory)


def test_a_removal_that_was_killed_is_finished(root: DirectoryFiles) -> None:
    save(root, "ckpt-1", 1)
    save(root, "ckpt-2", 2)

    def die(point: str) -> None:
        if point == "retention.after_manifest":
            raise KilledError

    with installed(die), pytest.raises(KilledError):
        remove_checkpoint(root.inside("ckpt-1"))
    with pytest.raises(rd.NotFoundError, match="did not come to its end"):
        open_checkpoint(root.inside("ckpt-1"))
    remove_what_was_killed(root, root.folders())
    assert root.folders() == ["ckpt-2"]
    assert open_checkpoint(root.inside("ckpt-2")).state("progress") == {"number": 2}


def test_what_a_manifest_does_not_name_goes(root: DirectoryFiles) -> None:
    directory = save(root, "ckpt-1", 1)
    before = directory.names()
    directory.write("progress.r0123456789ab.safetensors", lambda file: file.write(b"of a killed save"))
    remove_what_was_killed(root, ["ckpt-1"])
    assert directory.names() == before


def test_what_is_damaged_is_left(tmp_path: Path) -> None:
    root = directory_files(str(tmp_path))
    save(root, "ckpt-1", 1)
    (tmp_path / "ckpt-1" / "manifest.json").write_text("{}")
    remove_what_was_killed(root, ["ckpt-1"])
    assert len(os.listdir(tmp_path / "ckpt-1")) == 2


def test_what_somebody_else_has_put_there_stays(tmp_path: Path) -> None:
    root = directory_files(str(tmp_path))
    for name in ("ckpt-1", "ckpt-2"):
        directory = save(root, name, 1)
        for theirs in ("notes.txt", "merged.safetensors"):
            directory.write(theirs, lambda file: file.write(b"a user's"))
    (tmp_path / "ckpt-2" / "tokenizer").mkdir()
    foreign = {"ckpt-3": ["model.safetensors", "optimizer.pt"], "ckpt-4": ["model.safetensors", "shards"]}
    for name, (file, other) in foreign.items():  # other programs call their checkpoints so
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("")
        (tmp_path / name / other).mkdir() if name == "ckpt-4" else (tmp_path / name / other).write_text("")
    remove_what_was_killed(root, root.folders())
    assert all(os.listdir(tmp_path / name) for name in root.folders())
    assert {name: sorted(os.listdir(tmp_path / name)) for name in foreign} == foreign
    remove_checkpoint(root.inside("ckpt-1"))
    remove_checkpoint(root.inside("ckpt-2"))
    assert os.listdir(tmp_path / "ckpt-1") == ["notes.txt"]
    assert sorted(os.listdir(tmp_path / "ckpt-2")) == ["notes.txt", "tokenizer"]


def test_what_was_replaced_goes_where_that_was_killed(root: DirectoryFiles) -> None:
    directory = save(root, "ckpt-1", 1)

    def die(point: str) -> None:
        if point == "checkpoint.after_rename":
            raise KilledError

    with installed(die), pytest.raises(KilledError):
        save(root, "ckpt-1", 2)
    remove_what_was_killed(root, ["ckpt-1"])
    assert len(directory.names()) == 2
    assert open_checkpoint(directory).state("progress") == {"number": 2}
