from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest
import torch

import raydist as rd
from raydist.checkpoints.capture import save_capture
from raydist.checkpoints.checkpoint import contents_of
from raydist.checkpoints.new_files import MANIFEST_NAME, new_files
from raydist.checkpoints.saved_checkpoint import open_checkpoint
from raydist.errors import FailedPreconditionError
from raydist.failpoints import installed
from raydist.pipelines.stored.directory_files import DirectoryFiles, directory_files


@pytest.fixture(params=["local", "remote"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> DirectoryFiles:
    return directory_files(str(tmp_path / "x") if request.param == "local" else f"memory://{uuid.uuid4().hex}/x")


def save(directory: DirectoryFiles, content: bytes) -> None:
    new = new_files(directory)
    name = new.named("model", ".safetensors")
    new.files.write(name, lambda file: file.write(content))
    before = [read(directory, MANIFEST_NAME).decode()] if directory.exists(MANIFEST_NAME) else []
    new.commit(name.encode(), [name], before)


def read(directory: DirectoryFiles, name: str) -> bytes:
    opened = directory.open(name)
    try:
        return bytes(opened.file.read(1000) or b"")
    finally:
        opened.file.close()


def test_it_is_there_at_the_end(directory: DirectoryFiles) -> None:
    seen: list[tuple[str, bool]] = []
    with installed(lambda point: seen.append((point, directory.exists(MANIFEST_NAME)))):
        save(directory, b"data")
    assert directory.exists(MANIFEST_NAME)
    there = [point for point, found in seen if found]
    assert there == ["checkpoint.after_rename"]


def test_names_are_new_where_there_is_something(directory: DirectoryFiles) -> None:
    save(directory, b"first")
    first = read(directory, MANIFEST_NAME).decode()
    held: list[bytes] = []

    def look(point: str) -> None:
        if point == "checkpoint.before_manifest":
            held.append(read(directory, first))

    with installed(look):
        save(directory, b"second")
    second = read(directory, MANIFEST_NAME).decode()
    assert held == [b"first"]  # until the second is there
    assert first != second
    assert directory.names() == sorted([MANIFEST_NAME, second])
    assert read(directory, second) == b"second"


def test_names_are_plain_in_a_directory_of_ones_own(tmp_path: Path) -> None:
    save(directory_files(str(tmp_path / "x")), b"data")
    assert sorted(os.listdir(tmp_path / "x")) == [MANIFEST_NAME, "model.safetensors"]


def test_what_is_abandoned_leaves_what_was_there(directory: DirectoryFiles) -> None:
    save(directory, b"first")
    before = directory.names()
    new = new_files(directory)
    new.files.write(new.named("model", ".safetensors"), lambda file: file.write(b"second"))
    new.abandon()
    assert directory.names() == before


def test_what_is_abandoned_at_first_leaves_nothing(tmp_path: Path) -> None:
    new = new_files(directory_files(str(tmp_path / "x")))
    new.files.write("a", lambda file: file.write(b"1"))
    new.abandon()
    assert os.listdir(tmp_path) == []


def test_where_nothing_may_be_written(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    for path in (tmp_path / "x", tmp_path / "x" / "y", tmp_path / "x" / "y" / "z"):
        with pytest.raises(FailedPreconditionError, match=f"'{tmp_path}/x', but it is a file"):
            new_files(directory_files(str(path)))


def test_what_lies_beside_it_stays(directory: DirectoryFiles) -> None:
    directory.make()
    theirs = ["model.202611222305.safetensors", "model.safetensors", "notes.txt", "other.safetensors", "program.py"]
    for name in theirs:
        directory.write(name, lambda file: file.write(b"a user's"))
    checkpoint = rd.Checkpoint(model=torch.nn.Linear(1, 1))
    for _ in range(2):
        save_capture(contents_of(checkpoint).capture(), directory)
        assert len(directory.names()) == len(theirs) + 2
    save_capture(contents_of(rd.Checkpoint(net=torch.nn.Linear(1, 1))).capture(), directory)
    assert sorted({*directory.names()} & {*theirs}) == theirs
    assert len(directory.names()) == len(theirs) + 2


@pytest.mark.parametrize("again", [False, True])
def test_what_fails_when_it_is_there_stays_whole(directory: DirectoryFiles, again: bool) -> None:
    capture = contents_of(rd.Checkpoint(model=torch.nn.Linear(1, 1), progress=rd.State(number=2))).capture()
    if again:
        save_capture(contents_of(rd.Checkpoint(model=torch.nn.Linear(1, 1))).capture(), directory)

    def fail(point: str) -> None:
        if point == "checkpoint.after_rename":  # the answer of a store that has done it is lost, say
            raise OSError("the connection was cut off")

    with installed(fail), pytest.raises(OSError, match="cut off"):
        save_capture(capture, directory)
    saved = open_checkpoint(directory)
    assert saved.state("progress") == {"number": 2}
    assert sorted(saved.state("model")) == ["bias", "weight"]
