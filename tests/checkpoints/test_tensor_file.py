"""The files of a checkpoint that is being written."""

from __future__ import annotations

import json
import os
import pickle
import uuid
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import raydist as rd
from raydist.checkpoints.checkpoint import contents_of, start_save
from raydist.checkpoints.manifest import open_checkpoint
from raydist.checkpoints.read_tensors import read_tensors
from raydist.checkpoints.tensor_file import (
    MANIFEST_NAME,
    NewFiles,
    RowRange,
    new_files,
    plan_parts,
    write_index,
    write_tensor_file,
    write_tensors,
)
from raydist.core.errors import FailedPreconditionError
from raydist.core.failpoints import installed
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
        start_save(contents_of(checkpoint), directory, {}).write()
        assert len(directory.names()) == len(theirs) + 2
    start_save(contents_of(rd.Checkpoint(net=torch.nn.Linear(1, 1))), directory, {}).write()
    assert sorted({*directory.names()} & {*theirs}) == theirs
    assert len(directory.names()) == len(theirs) + 2


@pytest.mark.parametrize("again", [False, True])
def test_what_fails_when_it_is_there_stays_whole(directory: DirectoryFiles, again: bool) -> None:
    contents = contents_of(rd.Checkpoint(model=torch.nn.Linear(1, 1), progress=rd.State(number=2)))
    if again:
        start_save(contents_of(rd.Checkpoint(model=torch.nn.Linear(1, 1))), directory, {}).write()

    def fail(point: str) -> None:
        if point == "checkpoint.after_rename":  # the answer of a store that has done it is lost, say
            raise OSError("the connection was cut off")

    with installed(fail), pytest.raises(OSError, match="cut off"):
        start_save(contents, directory, {}).write()
    saved = open_checkpoint(directory)
    assert saved.state("progress") == {"number": 2}
    assert sorted(saved.state("model")) == ["bias", "weight"]


TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "turned": torch.arange(12, dtype=torch.int16).reshape(3, 4).T,
    "view": torch.arange(10.0)[2:5],
    "half": torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "many": torch.arange(3_000_000, dtype=torch.float32),  # several pieces
    'odd "name"\né': torch.ones(1, requires_grad=True),
}


@pytest.fixture
def new(tmp_path: Path) -> NewFiles:
    return NewFiles(directory_files(str(tmp_path)))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value.detach()), name


def test_any_reader_of_safetensors_reads_it(new: NewFiles, tmp_path: Path) -> None:
    (file,) = write_tensors(new, "model", TENSORS)
    assert file.name == "model.safetensors"
    assert_equal(load_file(tmp_path / file.name), TENSORS)
    with safe_open(tmp_path / file.name, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_what_is_written_is_described(new: NewFiles, tmp_path: Path) -> None:
    (file,) = write_tensors(new, "model", TENSORS)
    content = (tmp_path / file.name).read_bytes()
    assert file.num_bytes == len(content)
    assert file.crc32c == google_crc32c.value(content)
    assert file.header_crc32c == google_crc32c.value(content[: file.header_bytes])
    place = file.tensors["view"]
    assert place.crc32c == google_crc32c.value(content[place.begin : place.end])
    assert content[place.begin : place.end] == TENSORS["view"].numpy().tobytes()
    for key, each in file.tensors.items():
        assert each.begin % TENSORS[key].element_size() == 0
    assert pickle.loads(pickle.dumps(file)) == file


def test_large_states_are_several_files_with_an_index(new: NewFiles, tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.full((100,), float(i)) for i in range(5)}
    files = write_tensors(new, "model", tensors, max_part_bytes=900)
    assert [file.name for file in files] == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / files[-1].name).read_text())
    assert index["metadata"] == {"total_size": 2000}
    assert index["weight_map"]["layer.4"] == "model-00003-of-00003.safetensors"
    for key, name in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / name)[key], tensors[key])
    assert_equal(read_tensors(new.files, files), tensors)


def test_parts_are_filled_in_order() -> None:
    assert plan_parts({}, 5) == [[]]
    assert plan_parts({"a": 5, "b": 0, "c": 1}, 5) == [["a", "b"], ["c"]]
    assert plan_parts({"a": 50, "b": 50}, 5) == [["a"], ["b"]]


def test_slices_of_several_writers_make_a_whole(new: NewFiles, tmp_path: Path) -> None:
    whole = torch.arange(30.0).reshape(10, 3)
    parts = [(0, 4), (4, 4), (4, 10)]
    files = tuple(
        write_tensor_file(
            new,
            new.part_named("table", number, len(parts)),
            {"rows": whole[start:stop], f"own{number}": torch.tensor(number)},
            {"rows": RowRange(start, stop, 10)},
        )
        for number, (start, stop) in enumerate(parts)
    )
    files = (*files, write_index(new, "table", files))
    found = read_tensors(new.files, reversed(files))
    assert torch.equal(found["rows"], whole)
    assert int(found["own2"]) == 2
    plain = [load_file(tmp_path / file.name)[f"rows[{a}:{b}]"] for file, (a, b) in zip(files, parts, strict=False)]
    assert torch.equal(torch.cat(plain), whole)


def test_there_are_failpoints_within(new: NewFiles) -> None:
    passed: list[str] = []
    with installed(passed.append):
        write_tensors(new, "model", {"many": TENSORS["many"]})
    pieces = -(-TENSORS["many"].nbytes // 2**18)
    assert pieces > 3
    within = ["checkpoint.within_file"] * (1 + pieces)  # the header, too
    assert passed == [*within, "checkpoint.before_flush", "checkpoint.after_flush"]


def test_what_has_no_elements_wherever_it_comes_from(tmp_path: Path) -> None:
    new = NewFiles(directory_files(str(tmp_path)))
    tensors = {"a": torch.from_numpy(np.empty(3, np.int64)[:0].copy()), "b": torch.empty(0, 2)}
    write_tensor_file(new, "model.safetensors", tensors)
    found = load_file(tmp_path / "model.safetensors")
    assert {key: tensor.shape for key, tensor in found.items()} == {"a": (0,), "b": (0, 2)}
