"""A server reads what its slices are, from wherever it lies, into memory that nobody has yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.checkpoints import read_tensors
from raydist.checkpoints.capture import commit
from raydist.checkpoints.manifest import CheckpointManifest, SavedObject
from raydist.checkpoints.new_files import new_files
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint, open_checkpoint
from raydist.checkpoints.sharing.part_reader import StoredSlices
from raydist.checkpoints.sharing.restore_orders import RestoreOrder, StoredMemory, StoredSlice
from raydist.checkpoints.tensor_file import RowRange, write_tensor_file
from raydist.pipelines.stored.directory_files import directory_files
from tests.checkpoints.sharing.test_part_reader import Held

WEIGHT = torch.arange(20.0).reshape(10, 2)
CUTS = [(0, 3), (3, 4), (4, 10)]  # rows of each file
ENTRY = {"momentum_buffer": {"$tensor": "w.momentum_buffer"}, "step": {"$tensor": "w.step"}, "times": 3}


@pytest.fixture
def checkpoint(tmp_path: Path) -> SavedCheckpoint:
    """A tensor in three files, and what is remembered of it."""
    new = new_files(directory_files(str(tmp_path / "c")))
    files = [
        write_tensor_file(
            new,
            f"model-{number}.safetensors",
            {"w": WEIGHT[slice(*rows)].clone(), **({"s": torch.tensor(7.0)} if number == 1 else {})},
            {"w": RowRange(*rows, 10)},
        )
        for number, rows in enumerate(CUTS)
    ]
    state = {"w.momentum_buffer": -WEIGHT.double(), "w.step": torch.tensor(9.0)}
    files.append(write_tensor_file(new, "optimizer.safetensors", state))
    objects = {
        "model": SavedObject(
            "module",
            values={"w": {"$tensor": "w"}, "s": {"$tensor": "s"}},
            files=tuple(file.name for file in files[:3]),
        ),
        "optimizer": SavedObject("optimizer", "SGD", {"w": ENTRY}, (files[3].name,)),
    }
    commit(new, CheckpointManifest(objects, tuple(files)))
    return open_checkpoint(directory_files(str(tmp_path / "c")))


def memory_of(number: int, begin: int, entry: Any = ENTRY) -> StoredMemory:
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": False}
    return StoredMemory("optimizer", 5, number, "optimizer", "w", (10, 2), begin, entry, options)


def held(**slices: torch.Tensor) -> Held:
    found = Held()
    found.values = {int(name.strip("n")): tensor for name, tensor in slices.items()}
    return found


@pytest.mark.parametrize("piece_bytes", [8, 24, 1 << 20])
@pytest.mark.parametrize(("first", "last"), [(0, 10), (0, 3), (2, 5), (3, 4), (9, 10)])
def test_slices_are_found_wherever_they_lie(
    first: int, last: int, piece_bytes: int, checkpoint: SavedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_tensors, "_PIECE_BYTES", piece_bytes)
    order = RestoreOrder(
        "a",
        checkpoint,
        slices=(StoredSlice(1, "model", "w", first), StoredSlice(2, "model", "s", 0)),
        memories=(memory_of(1, first), memory_of(3, 0)),
    )
    stored = StoredSlices(order, held(n1=torch.zeros(last - first, 2), n2=torch.tensor(0.0), n3=torch.zeros(2, 2)))
    stored.open()
    stored.read()
    assert torch.equal(stored.values[1], WEIGHT[first:last])
    assert stored.values[2].item() == 7
    found = stored.memories[5][1]
    assert torch.equal(found["momentum_buffer"], -WEIGHT[first:last])
    assert found["momentum_buffer"].dtype == torch.float64, "as saved"
    assert (found["step"].item(), found["times"]) == (9, 3)
    assert torch.equal(stored.memories[5][3]["momentum_buffer"], -WEIGHT[:2])
    assert found["step"] is not stored.memories[5][3]["step"]


def test_what_others_have_is_not_read_and_the_rest_is(checkpoint: SavedCheckpoint, tmp_path: Path) -> None:
    for name in ("model-0.safetensors", "model-1.safetensors"):
        path = tmp_path / "c" / name
        content = bytearray(path.read_bytes())
        place = next(file for file in checkpoint.manifest.files if file.name == name).tensors["w"]
        content[place.begin] ^= 1
        path.write_bytes(content)
    order = RestoreOrder("a", checkpoint, slices=(StoredSlice(1, "model", "w", 4),))
    stored = StoredSlices(order, held(n1=torch.zeros(6, 2)))
    stored.open()
    stored.read()
    assert torch.equal(stored.values[1], WEIGHT[4:])
    stored = StoredSlices(RestoreOrder("a", checkpoint, rest={"model": frozenset({"w"})}), held())
    stored.open()
    with pytest.raises(rd.DataLossError, match=r"model-0.safetensors.*'w' differs"):
        stored.read()


def test_files_are_looked_at_before_memory_is_made(checkpoint: SavedCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "c" / "model-2.safetensors").unlink()
    stored = StoredSlices(RestoreOrder("a", checkpoint, slices=(StoredSlice(1, "model", "w", 0),)), held(n1=WEIGHT))
    with pytest.raises(rd.DataLossError, match="model-2.safetensors' is missing"):
        stored.open()
    assert not stored.values


def test_nothing_is_remembered_where_nothing_was(checkpoint: SavedCheckpoint) -> None:
    stored = StoredSlices(RestoreOrder("a", checkpoint, memories=(memory_of(1, 0, None),)), held(n1=WEIGHT))
    stored.open()
    stored.read()
    assert stored.memories == {5: {1: {}}}


def test_what_is_remembered_now_is_compared(checkpoint: SavedCheckpoint) -> None:
    has = held(n1=WEIGHT[:4])
    now: Mapping[str, Any] = {"momentum_buffer": WEIGHT[:4], "step": torch.zeros(1), "other": torch.zeros(3)}
    has.memories = {5: {1: now}}
    stored = StoredSlices(RestoreOrder("a", checkpoint, memories=(memory_of(1, 0),)), has)
    assert [(each.what, each.entry) for each in stored.differences["optimizer"]] == [
        ("retyped", "optimizer.w.momentum_buffer"),
        ("reshaped", "optimizer.w.step"),
    ]
    has.memories = {5: {1: {"momentum_buffer": WEIGHT[:4].double()}}}
    assert not StoredSlices(RestoreOrder("a", checkpoint, memories=(memory_of(1, 0),)), has).differences


def test_it_stops_where_nobody_wants_more(checkpoint: SavedCheckpoint) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    order = RestoreOrder("a", checkpoint, slices=(StoredSlice(1, "model", "w", 0),))
    stored = StoredSlices(order, held(n1=WEIGHT), stop)
    stored.open()
    with pytest.raises(KeyboardInterrupt):
        stored.read()
