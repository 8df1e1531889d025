"""The files of a checkpoint: their names, what is written into them, and reading them again."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import raydist as rd
from raydist.actors.portable_errors import pack_error
from raydist.checkpoints.capture import Capture, CapturedObject, StagingBuffers
from raydist.checkpoints.checkpoint import contents_of, start_save
from raydist.checkpoints.manifest import SavedObject, open_checkpoint
from raydist.checkpoints.ps_restore import StoredOptimizerState, loaded_state
from raydist.checkpoints.read_tensors import read_slices, read_tensors
from raydist.checkpoints.shards import DispatchedSave, Shard, ShardRequest, ShardWriter, plan_files
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
from raydist.core.errors import CancelledError, DataLossError, DeadlineExceededError
from raydist.core.failpoints import installed
from raydist.pipelines.stored.directory_files import DirectoryFiles, directory_files


@pytest.fixture
def directories(tmp_path: Path) -> list[DirectoryFiles]:
    """One on this machine and one that is not."""
    return [directory_files(str(tmp_path / "x")), directory_files(f"memory://{uuid.uuid4().hex}/x")]


def save_bytes(directory: DirectoryFiles, content: bytes) -> None:
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
            save_bytes(directory, b"first")
        assert [point for point, found in seen if found] == ["checkpoint.after_rename"]
        first = read(directory, MANIFEST_NAME).decode()
        held: list[bytes] = []

        def look(
            point: str, directory: DirectoryFiles = directory, held: list[bytes] = held, first: str = first
        ) -> None:
            if point == "checkpoint.before_manifest":
                held.append(read(directory, first))

        with installed(look):
            save_bytes(directory, b"second")
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


# --- parts of saves on replicas and parameter servers -----------------------------------------------------------------

CPU = torch.device("cpu")


def report(writer: ShardWriter, token: str) -> Shard | Exception:
    end = time.monotonic() + 10
    while (found := writer.report(token)) is None and time.monotonic() < end:
        time.sleep(0.01)
    assert found is not None
    return found


def request(path: Path, token: str = "a", **stems: str) -> ShardRequest:
    return ShardRequest(token, new_files(directory_files(str(path))), stems)


class Bad:
    """Has a state that cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"fn": print}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Never called."""


def test_errors_of_shards_are_reported_and_not_raised_in_the_step(tmp_path: Path) -> None:
    writer = ShardWriter(0, 1, CPU)
    writer.begin(request(tmp_path / "c", bad="bad"), {"bad": Bad()}, {})
    with pytest.raises(ValueError, match=r"bad\.fn|'bad'"):
        raise report(writer, "a")  # type: ignore[misc]  # an exception, as the next line would find out
    lost = request(tmp_path / "d", token="b", model="model")
    (tmp_path / "d").rmdir()
    writer.begin(lost, {"model": torch.nn.Linear(1, 1)}, {})
    assert isinstance(report(writer, "b"), Exception)
    writer.close(10)


def test_memory_of_copies_is_reused_if_it_fits_and_is_not_being_written() -> None:
    staging = StagingBuffers()

    def copied(**tensors: torch.Tensor) -> Mapping[str, torch.Tensor]:
        capture = Capture({"model": CapturedObject(SavedObject("module"), tensors)})
        return staging.copy_capture(capture).objects["model"].tensors

    first = copied(w=torch.ones(3), v=torch.ones(2), gone=torch.ones(1))
    second = copied(w=torch.zeros(3), v=torch.zeros(2, dtype=torch.int64))
    assert second["w"].data_ptr() == first["w"].data_ptr()
    assert second["v"].data_ptr() != first["v"].data_ptr()
    assert (second["w"].tolist(), second["v"].tolist()) == ([0, 0, 0], [0, 0])
    assert set(staging._free) == {("model", "w"), ("model", "v")}
    staging = StagingBuffers()
    written = staging.copy("model", "w", torch.ones(3))
    other = staging.copy("model", "w", torch.zeros(3))
    assert other.data_ptr() != written.data_ptr()
    assert written.tolist() == [1, 1, 1], "it is being written"
    staging.give_back({("model", "w"): written})
    assert staging.copy("model", "w", torch.zeros(3)).data_ptr() == written.data_ptr()
    assert staging.copy("model", "w", torch.zeros(3)).data_ptr() != written.data_ptr()


MIB = 1 << 20


def test_every_tensor_is_in_one_file_and_large_objects_are_divided_evenly() -> None:
    sizes = {"model": {f"w{n}": 4 * MIB for n in range(64)}, "small": {"a": 1, "b": 2}, "none": {}}
    for num_replicas in (1, 2, 3, 8):
        files = plan_files(sizes, num_replicas)
        keys = [(file.owner, key) for file in files for key in file.keys]
        assert sorted(keys) == sorted((owner, key) for owner, tensors in sizes.items() for key in tensors)
        load = [0] * num_replicas
        for file in files:
            load[file.rank] += sum(sizes[file.owner][key] for key in file.keys)
        assert max(load) - min(load) <= 8 * MIB, num_replicas
        assert [file.count for file in files if file.owner == "small"] == [1]
        (count,) = {file.count for file in files if file.owner == "model"}
        assert num_replicas <= count <= num_replicas + 1
    # What is not divided belongs to the first replica.
    files = plan_files({"a": {"w": 9}, "b": {"w": 40 * MIB, "v": 40 * MIB}}, 3, whole={"b"}, max_part_bytes=50 * MIB)
    found = [(file.owner, file.number, file.count, file.rank) for file in files]
    assert found == [("a", 0, 1, 0), ("b", 0, 2, 0), ("b", 1, 2, 0)]


class Group:
    """Answers as replicas would, one list a question; the last one for good."""

    def __init__(self, *answers: Sequence[Any]) -> None:
        self.answers = list(answers)
        self.num_asked = 0

    def ask(self) -> Sequence[Any]:
        self.num_asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def save(group: Group, limit_s: float = 10.0) -> DispatchedSave:
    return DispatchedSave(group.ask, limit_s)


def test_a_save_waits_for_all_shards_or_the_error_that_caused_others() -> None:
    group = Group([None, None], [Shard({}), None], [Shard({}), Shard({})])
    waiting = save(group)
    assert not waiting.is_done
    assert waiting.wait() == [Shard({}), Shard({})]
    assert waiting.is_done
    assert group.num_asked == 3
    with pytest.raises(DeadlineExceededError, match=r"within 0\.01 s, but 1 of 2 replicas have not"):
        save(Group([None, Shard({})]), 0.01).wait()
    consequence, cause = pack_error(CancelledError("given up")), pack_error(ValueError("bad row"))
    with pytest.raises(ValueError, match="bad row"):
        save(Group([consequence, None], [consequence, cause])).wait()
    with pytest.raises(CancelledError, match="given up"):
        save(Group([consequence, Shard({})])).wait()


def test_a_state_is_as_after_load_state_dict_with_the_saved_types() -> None:
    for dtype, fused in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, True), (torch.float32, True)):
        parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = torch.optim.Adam([parameter], lr=0.1)
        state = {"step": torch.tensor(3.0).double(), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3).double()}
        saved: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
        saved["state"][0] = state
        saved["param_groups"][0]["fused"] = fused
        optimizer.load_state_dict(saved)
        expected = optimizer.state[parameter]
        options = {name: value for name, value in saved["param_groups"][0].items() if name != "params"}
        memory = StoredOptimizerState("adam", 5, 1, "adam", "w", (3,), 0, {}, options)
        found = loaded_state(memory, state, torch.optim.Adam, dtype)
        torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0, check_dtype=False)
        assert {name: each.dtype for name, each in found.items()} == {
            **{name: each.dtype for name, each in state.items()},
            "step": expected["step"].dtype,
        }
