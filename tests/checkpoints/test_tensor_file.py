"""The files of a checkpoint: their names, what is written into them, and reading them again."""

from __future__ import annotations

import dataclasses
import json
import pickle
import uuid
from collections.abc import Callable
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
from raydist.checkpoints.read_tensors import read_slices, read_tensors
from raydist.checkpoints.tensor_file import (
    MANIFEST_NAME,
    NewFiles,
    RowRange,
    TensorFile,
    new_files,
    write_index,
    write_tensor_file,
    write_tensors,
)
from raydist.core.errors import DataLossError
from raydist.core.failpoints import installed
from raydist.pipelines.stored.directory_files import DirectoryFiles, directory_files


@pytest.fixture
def directories(tmp_path: Path) -> list[DirectoryFiles]:
    """One on this machine and one that is not."""
    return [directory_files(str(tmp_path / "x")), directory_files(f"memory://{uuid.uuid4().hex}/x")]


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


def test_files_of_a_save_have_new_names_until_it_is_complete(directories: list[DirectoryFiles]) -> None:
    for directory in directories:
        seen: list[tuple[str, bool]] = []
        with installed(lambda point: seen.append((point, directory.exists(MANIFEST_NAME)))):  # noqa: B023
            save(directory, b"first")
        assert [point for point, found in seen if found] == ["checkpoint.after_rename"]
        first = read(directory, MANIFEST_NAME).decode()
        held: list[bytes] = []

        def look(
            point: str, directory: DirectoryFiles = directory, held: list[bytes] = held, first: str = first
        ) -> None:
            if point == "checkpoint.before_manifest":
                held.append(read(directory, first))

        with installed(look):
            save(directory, b"second")
        second = read(directory, MANIFEST_NAME).decode()
        assert held == [b"first"]  # until the second is there
        assert first != second
        assert directory.names() == sorted([MANIFEST_NAME, second])
        assert read(directory, second) == b"second"


def test_other_files_are_kept(directories: list[DirectoryFiles]) -> None:
    theirs = ["model.202611222305.safetensors", "model.safetensors", "notes.txt", "other.safetensors", "program.py"]
    checkpoint = rd.Checkpoint(model=torch.nn.Linear(1, 1))

    def fail(point: str) -> None:
        if point == "checkpoint.before_manifest":
            raise OSError("the disk is full")

    for directory in directories:
        directory.make()
        for name in theirs:
            directory.write(name, lambda file: file.write(b"a user's"))
        for each in (checkpoint, checkpoint, rd.Checkpoint(net=torch.nn.Linear(1, 1))):
            start_save(contents_of(each), directory, {}).write()
            assert len(directory.names()) == len(theirs) + 2
        before = directory.names()
        with installed(fail), pytest.raises(OSError, match="full"):
            start_save(contents_of(checkpoint), directory, {}).write()
        assert directory.names() == before, "what a failed save has written is gone"
        assert sorted({*before} & {*theirs}) == theirs


def test_an_error_after_the_rename_keeps_the_checkpoint(directories: list[DirectoryFiles]) -> None:
    def fail(point: str) -> None:
        if point == "checkpoint.after_rename":  # the answer of a store that has done it is lost, say
            raise OSError("the connection was cut off")

    for directory in directories:
        for number in range(2):
            contents = contents_of(rd.Checkpoint(model=torch.nn.Linear(1, 1), progress=rd.State(number=number)))
            with installed(fail), pytest.raises(OSError, match="cut off"):
                start_save(contents, directory, {}).write()
            saved = open_checkpoint(directory)
            assert saved.state("progress") == {"number": number}
            assert sorted(saved.state("model")) == ["bias", "weight"]


TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "none": torch.from_numpy(np.empty(3, np.int64)[:0].copy()),
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


def test_any_reader_of_safetensors_reads_it_as_the_writer_describes_it(new: NewFiles, tmp_path: Path) -> None:
    (file,) = write_tensors(new, "model", TENSORS)
    assert file.name == "model.safetensors"
    assert_equal(load_file(tmp_path / file.name), TENSORS)
    with safe_open(tmp_path / file.name, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
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


def test_slices_of_several_writers_are_joined(new: NewFiles, tmp_path: Path) -> None:
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


TWO_TENSORS = {"a": torch.arange(100.0), "b": torch.arange(50, dtype=torch.int32)}


def flip(at: int) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[at] ^= 4
        return bytes(changed)

    return damage


def test_damage_names_file_and_tensor(new: NewFiles, tmp_path: Path) -> None:
    cases: list[tuple[Callable[[bytes], bytes], str]] = [
        (flip(0), "its header differs"),
        (flip(30), "its header differs"),
        (flip(-1), "tensor 'b' differs"),
        (flip(-201), "tensor 'a' differs"),
        (lambda content: content[:-1], "must have"),
        (lambda content: content + b"\0", "must have"),
        (lambda content: b"", "must have"),
    ]
    files = write_tensors(new, "model", TWO_TENSORS)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for damage, told in cases:
        path.write_bytes(damage(whole))
        with pytest.raises(DataLossError, match=told) as raised:
            pytest.fail(f"{told}: {read_tensors(new.files, files)}")
        assert raised.value.path == str(path)
        assert str(path) in str(raised.value)


def test_reading_some_tensors_of_a_file(new: NewFiles, tmp_path: Path) -> None:
    rows = {"a": RowRange(100, 200, 300)}
    file = write_tensor_file(new, "model.safetensors", TWO_TENSORS, rows)
    found = read_slices(new.files, file, ["a"])
    assert list(found) == ["a"]
    assert torch.equal(found["a"], TWO_TENSORS["a"]), "the rows that are there"
    assert read_slices(new.files, file, []) == {}
    path = tmp_path / "model.safetensors"
    path.write_bytes(flip(-1)(path.read_bytes()))  # of b
    assert torch.equal(read_slices(new.files, file, ["a"])["a"], TWO_TENSORS["a"])
    with pytest.raises(DataLossError, match="tensor 'b' differs"):
        read_slices(new.files, file, ["b"])
    path.write_bytes(flip(9)(path.read_bytes()))
    with pytest.raises(DataLossError, match="its header differs"):
        read_slices(new.files, file, [])


def test_missing_tensors_allocate_no_memory(new: NewFiles, tmp_path: Path) -> None:
    """A manifest may say that a tensor of a petabyte has most of its rows in a file that is missing."""
    (file,) = write_tensors(new, "model", {"a": torch.zeros(2)})
    place = file.tensors["a"]
    shape = (1 << 50,)
    here = dataclasses.replace(place, shape=shape, rows=(0, 2))
    there = dataclasses.replace(place, shape=shape, rows=(2, 1 << 50))
    claims = [dataclasses.replace(file, tensors={"a": here}), TensorFile("other", 1 << 52, 0, 0, 0, {"a": there})]
    with pytest.raises(DataLossError, match="other' is missing"):
        read_tensors(new.files, claims)
