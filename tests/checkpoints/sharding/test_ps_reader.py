"""A server reads what it holds, from wherever it lies, into memory that nobody has yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.actors.portable_errors import PortableError
from raydist.checkpoints import read_tensors
from raydist.checkpoints.capture import commit
from raydist.checkpoints.manifest import CheckpointManifest, SavedCheckpoint, SavedObject, open_checkpoint
from raydist.checkpoints.ps_reader import PartReader, StoredColumn, StoredRows, StoredSlices
from raydist.checkpoints.ps_restore import RestoreCommand, StoredOptimizerState, StoredSlice, StoredTable
from raydist.checkpoints.read_tensors import read_pieces
from raydist.checkpoints.restore import PreparedShard
from raydist.checkpoints.tensor_file import RowRange, new_files, write_tensor_file
from raydist.core.errors import CancelledError, FailedPreconditionError
from raydist.parameter_servers.rows.row_table import RowTable
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec
from raydist.pipelines.stored.directory_files import directory_files

TOUCHED = torch.tensor([3, 5, 8])


class Held:
    """One table, of which a row was touched."""

    def __init__(self) -> None:
        self.tables: dict[int, Any] = {4: RowTable(EmbeddingTableSpec(10, 2, seed=7))}
        self.values: dict[int, torch.Tensor] = {8: torch.zeros(2, 2)}
        self.optimizer_states: dict[int, Any] = {}
        self.before = self.tables[4]
        self.before.pull(torch.tensor([1]))

    def table(self, handle: int) -> RowTable:
        found: RowTable = self.tables[handle]
        return found

    def value(self, number: int) -> torch.Tensor:
        return self.values[number]

    def state(self, optimizer: int, number: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.optimizer_states.get(optimizer, {}).get(number, {})
        return found

    def optimizer_kind(self, handle: int) -> type[torch.optim.Optimizer]:
        return torch.optim.SGD

    def replace(
        self,
        tables: Mapping[int, RowTable],
        values: Mapping[int, torch.Tensor],
        optimizer_states: Mapping[int, Mapping[int, Mapping[str, Any]]],
    ) -> None:
        self.tables.update(tables)
        self.values.update(values)
        self.optimizer_states.update(optimizer_states)


@pytest.fixture
def command(tmp_path: Path) -> RestoreCommand:
    bag = torch.nn.ModuleDict({"words": rd.ShardedEmbedding(10, 2, seed=1)})
    bag["words"](TOUCHED)
    rd.Checkpoint(bag=bag).save(tmp_path / "c")
    checkpoint = open_checkpoint(directory_files(str(tmp_path / "c")))
    return RestoreCommand("a", checkpoint, (StoredTable(4, "bag.embedding_rows", "words"),))


def outcome(reader: PartReader, token: str = "a") -> Any:
    limit = time.monotonic() + 10
    while (found := reader.report(token)) is None:
        assert time.monotonic() < limit
        time.sleep(0.001)
    return found


def test_it_is_held_aside_until_it_is_committed(command: RestoreCommand) -> None:
    reader, held = PartReader(), Held()
    reader.begin(command, held)
    assert outcome(reader) == PreparedShard()
    assert held.tables[4] is held.before
    assert reader.report("b") is None
    reader.commit("a", held)
    assert held.tables[4].state()["rows"].tolist() == TOUCHED.tolist()
    with pytest.raises(FailedPreconditionError, match="must have read its part"):
        reader.commit("a", held)


def test_an_order_that_comes_again_is_carried_out_once(
    command: RestoreCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, held = PartReader(), Held()
    reader.begin(command, held)
    first = reader._reading
    reader.begin(command, held)
    assert reader._reading is first
    assert outcome(reader) == PreparedShard()


def test_what_was_not_read_well_cannot_be_committed(command: RestoreCommand, tmp_path: Path) -> None:
    file = tmp_path / "c" / "bag.embedding_rows.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    reader, held = PartReader(), Held()
    reader.begin(command, held)
    found = outcome(reader)
    assert isinstance(found, PortableError)
    with pytest.raises(rd.DataLossError, match=r"bag.embedding_rows.safetensors.*'words/0.values' differs"):
        raise found.restore()
    with pytest.raises(FailedPreconditionError, match="must have read its part"):
        reader.commit("a", held)
    file.unlink()
    reader.discard()
    reader.begin(command, held)
    assert outcome(reader) == PreparedShard(sees_files=False)
    with pytest.raises(FailedPreconditionError, match="must have read its part"):
        reader.commit("a", held)
    assert held.tables[4] is held.before


def test_who_is_told_to_forget_reads_no_further(command: RestoreCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reader, held = threading.Event(), PartReader(), Held()
    original = read_pieces

    def slow(*args: Any) -> Any:
        assert gate.wait(10)
        return original(*args)

    monkeypatch.setattr("raydist.checkpoints.ps_reader.read_pieces", slow)
    reader.begin(command, held)
    reading = reader._reading
    assert reading is not None
    reader.discard()
    gate.set()
    reading.join(10)
    assert reader.report("a") is None
    found = reading.outcome
    assert isinstance(found, PortableError)
    assert isinstance(found.restore(), CancelledError)
    reader.begin(command, held)
    reader.close(10)
    assert not any(thread.name == "raydist-restore" for thread in threading.enumerate())


PULLED = torch.arange(0, 500, 2)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[SavedCheckpoint, Any]:
    words = rd.ShardedEmbedding(500, 2)
    bag = torch.nn.ModuleDict({"words": words, "tags": rd.ShardedEmbedding(500, 1)})
    optimizer = torch.optim.Adam(words.parameters())
    words(PULLED).sum().backward()
    optimizer.step()
    rd.Checkpoint(bag=bag).save(tmp_path / "c")
    return open_checkpoint(directory_files(str(tmp_path / "c"))), words.export_rows()


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    return torch.cat(list(value.pieces())) if isinstance(value, StoredColumn) else value


@pytest.mark.parametrize("piece_bytes", [7, 64, 1 << 20])
def test_it_is_what_the_table_had(
    piece_bytes: int, saved: tuple[SavedCheckpoint, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, exported = saved
    monkeypatch.setattr(read_tensors, "_PIECE_BYTES", piece_bytes)
    rows = StoredRows(checkpoint, "bag.embedding_rows")
    rows.open()
    states = rows.states("words")
    torch.testing.assert_close(whole(states[0]), exported[0], rtol=0, atol=0)
    assert states[0]["values"].shape == (250, 2)
    sizes = [len(piece) for piece in states[0]["values"].pieces()]
    assert max(sizes) <= max(1, piece_bytes // 8)
    assert rows.states("elsewhere") == []


def test_rows_are_read_no_further_where_nobody_wants_more(saved: tuple[SavedCheckpoint, Any]) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    rows = StoredRows(saved[0], "bag.embedding_rows", stop)
    rows.open()
    with pytest.raises(KeyboardInterrupt):
        whole(rows.states("words")[0])


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


def memory_of(number: int, begin: int, entry: Any = ENTRY) -> StoredOptimizerState:
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": False}
    return StoredOptimizerState("optimizer", 5, number, "optimizer", "w", (10, 2), begin, entry, options)


def held(**slices: torch.Tensor) -> Held:
    found = Held()
    found.values = {int(name.strip("n")): tensor for name, tensor in slices.items()}
    return found


@pytest.mark.parametrize("piece_bytes", [8, 1 << 20])
@pytest.mark.parametrize(("first", "last"), [(0, 10), (2, 5), (9, 10)])
def test_slices_are_found_wherever_they_lie(
    first: int, last: int, piece_bytes: int, checkpoint: SavedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_tensors, "_PIECE_BYTES", piece_bytes)
    command = RestoreCommand(
        "a",
        checkpoint,
        slices=(StoredSlice(1, "model", "w", first), StoredSlice(2, "model", "s", 0)),
        optimizer_states=(memory_of(1, first), memory_of(3, 0)),
    )
    stored = StoredSlices(command, held(n1=torch.zeros(last - first, 2), n2=torch.tensor(0.0), n3=torch.zeros(2, 2)))
    stored.open()
    stored.read()
    assert torch.equal(stored.values[1], WEIGHT[first:last])
    assert stored.values[2].item() == 7
    found = stored.optimizer_states[5][1]
    assert torch.equal(found["momentum_buffer"], -WEIGHT[first:last])
    assert found["momentum_buffer"].dtype == torch.float64, "as saved"
    assert (found["step"].item(), found["times"]) == (9, 3)
    assert torch.equal(stored.optimizer_states[5][3]["momentum_buffer"], -WEIGHT[:2])
    assert found["step"] is not stored.optimizer_states[5][3]["step"]


def test_what_others_have_is_not_read_and_the_rest_is(checkpoint: SavedCheckpoint, tmp_path: Path) -> None:
    for name in ("model-0.safetensors", "model-1.safetensors"):
        path = tmp_path / "c" / name
        content = bytearray(path.read_bytes())
        place = next(file for file in checkpoint.manifest.files if file.name == name).tensors["w"]
        content[place.begin] ^= 1
        path.write_bytes(content)
    command = RestoreCommand("a", checkpoint, slices=(StoredSlice(1, "model", "w", 4),))
    stored = StoredSlices(command, held(n1=torch.zeros(6, 2)))
    stored.open()
    stored.read()
    assert torch.equal(stored.values[1], WEIGHT[4:])
    stored = StoredSlices(RestoreCommand("a", checkpoint, rest={"model": frozenset({"w"})}), held())
    stored.open()
    with pytest.raises(rd.DataLossError, match=r"model-0.safetensors.*'w' differs"):
        stored.read()


def test_files_are_looked_at_before_memory_is_made(checkpoint: SavedCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "c" / "model-2.safetensors").unlink()
    stored = StoredSlices(RestoreCommand("a", checkpoint, slices=(StoredSlice(1, "model", "w", 0),)), held(n1=WEIGHT))
    with pytest.raises(rd.DataLossError, match="model-2.safetensors' is missing"):
        stored.open()
    assert not stored.values


def test_nothing_is_remembered_where_nothing_was(checkpoint: SavedCheckpoint) -> None:
    stored = StoredSlices(RestoreCommand("a", checkpoint, optimizer_states=(memory_of(1, 0, None),)), held(n1=WEIGHT))
    stored.open()
    stored.read()
    assert stored.optimizer_states == {5: {1: {}}}


def test_what_is_remembered_now_is_compared(checkpoint: SavedCheckpoint) -> None:
    has = held(n1=WEIGHT[:4])
    now: Mapping[str, Any] = {"momentum_buffer": WEIGHT[:4], "step": torch.zeros(1), "other": torch.zeros(3)}
    has.optimizer_states = {5: {1: now}}
    stored = StoredSlices(RestoreCommand("a", checkpoint, optimizer_states=(memory_of(1, 0),)), has)
    assert [(each.what, each.entry) for each in stored.differences["optimizer"]] == [
        ("retyped", "optimizer.w.momentum_buffer"),
        ("reshaped", "optimizer.w.step"),
    ]
    has.optimizer_states = {5: {1: {"momentum_buffer": WEIGHT[:4].double()}}}
    assert not StoredSlices(RestoreCommand("a", checkpoint, optimizer_states=(memory_of(1, 0),)), has).differences


def test_it_stops_where_nobody_wants_more(checkpoint: SavedCheckpoint) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    command = RestoreCommand("a", checkpoint, slices=(StoredSlice(1, "model", "w", 0),))
    stored = StoredSlices(command, held(n1=WEIGHT), stop)
    stored.open()
    with pytest.raises(KeyboardInterrupt):
        stored.read()
