"""Parameter servers' parts of saves and restores. tests/coordinator has whole saves and restores with servers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import raydist as rd
from raydist.actors.portable_errors import PortableError
from raydist.checkpoints import read_tensors
from raydist.checkpoints.capture import commit
from raydist.checkpoints.manifest import CheckpointManifest, SavedCheckpoint, SavedObject, open_checkpoint
from raydist.checkpoints.ps_reader import ServerReader, StoredColumn, StoredRows, StoredSlices
from raydist.checkpoints.ps_restore import (
    RestoreCommand,
    StoredOptimizerState,
    StoredSlice,
    StoredTable,
    loaded_options,
    loaded_state,
)
from raydist.checkpoints.ps_save import (
    SaveCommand,
    SaveCommands,
    ServerWriter,
    SliceFile,
    SlicePlace,
)
from raydist.checkpoints.read_tensors import read_pieces
from raydist.checkpoints.shards import Shard, ShardRequest
from raydist.checkpoints.tensor_file import NewFiles, RowRange, new_files, write_tensor_file
from raydist.core.errors import CancelledError
from raydist.parameter_servers.row_table import RowTable
from raydist.parameter_servers.slices import PsSlice
from raydist.parameter_servers.table_spec import EmbeddingTableSpec
from raydist.pipelines.stored.directory_files import LocalFiles, directory_files


class Held:
    """The part of one server: a table and slices, without states of optimizers."""

    def __init__(self, values: Mapping[int, torch.Tensor] | None = None) -> None:
        self.values = dict(values or {})

    def table(self, handle: int) -> RowTable:
        return RowTable(EmbeddingTableSpec(10, 2, seed=7))

    def value(self, number: int) -> torch.Tensor:
        return self.values[number]

    def state(self, optimizer: int, number: int) -> Mapping[str, Any]:
        return {}

    def optimizer_kind(self, handle: int) -> type[torch.optim.Optimizer]:
        return torch.optim.SGD

    def replace(self, *values: Any) -> None:
        raise AssertionError("no test commits")


def state_of(values: Mapping[int, torch.Tensor] | None = None) -> Any:
    return Held(values)


@pytest.fixture
def command(tmp_path: Path) -> RestoreCommand:
    bag = torch.nn.ModuleDict({"words": rd.ShardedEmbedding(10, 2, seed=1)})
    bag["words"](torch.tensor([3, 5, 8]))
    rd.Checkpoint(bag=bag).save(tmp_path / "c")
    checkpoint = open_checkpoint(directory_files(str(tmp_path / "c")))
    return RestoreCommand("a", checkpoint, (StoredTable(4, "bag.embedding_rows", "words"),))


def test_forgotten_restores_stop_reading(command: RestoreCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reader, held = threading.Event(), ServerReader(), state_of()
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
def saved_rows(tmp_path: Path) -> tuple[SavedCheckpoint, Any]:
    words = rd.ShardedEmbedding(500, 2)
    bag = torch.nn.ModuleDict({"words": words, "tags": rd.ShardedEmbedding(500, 1)})
    optimizer = torch.optim.Adam(words.parameters())
    words(PULLED).sum().backward()
    optimizer.step()
    rd.Checkpoint(bag=bag).save(tmp_path / "c")
    return open_checkpoint(directory_files(str(tmp_path / "c"))), words.export_rows()


def joined(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: joined(part) for key, part in value.items()}
    return torch.cat(list(value.pieces())) if isinstance(value, StoredColumn) else value


@pytest.mark.parametrize("piece_bytes", [7, 64, 1 << 20])
def test_stored_rows_equal_those_of_the_table(
    piece_bytes: int, saved_rows: tuple[SavedCheckpoint, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, exported = saved_rows
    monkeypatch.setattr(read_tensors, "_PIECE_BYTES", piece_bytes)
    rows = StoredRows(checkpoint, "bag.embedding_rows")
    rows.open()
    states = rows.states("words")
    torch.testing.assert_close(joined(states[0]), exported[0], rtol=0, atol=0)
    assert states[0]["values"].shape == (250, 2)
    sizes = [len(piece) for piece in states[0]["values"].pieces()]
    assert max(sizes) <= max(1, piece_bytes // 8)
    assert rows.states("elsewhere") == []


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


def stored_state(number: int, begin: int) -> StoredOptimizerState:
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": False}
    return StoredOptimizerState("optimizer", 5, number, "optimizer", "w", (10, 2), begin, ENTRY, options)


@pytest.mark.parametrize("piece_bytes", [8, 1 << 20])
@pytest.mark.parametrize(("first", "last"), [(0, 10), (2, 5), (9, 10)])
def test_slices_are_found_in_any_file(
    first: int, last: int, piece_bytes: int, checkpoint: SavedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_tensors, "_PIECE_BYTES", piece_bytes)
    command = RestoreCommand(
        "a",
        checkpoint,
        slices=(StoredSlice(1, "model", "w", first), StoredSlice(2, "model", "s", 0)),
        optimizer_states=(stored_state(1, first), stored_state(3, 0)),
    )
    stored = StoredSlices(
        command, state_of({1: torch.zeros(last - first, 2), 2: torch.tensor(0.0), 3: torch.zeros(2, 2)})
    )
    stored.open()
    stored.read()
    assert torch.equal(stored.values[1], WEIGHT[first:last])
    assert stored.values[2].item() == 7
    found = stored.optimizer_states[5][1]
    assert torch.equal(found["momentum_buffer"], -WEIGHT[first:last])
    assert found["momentum_buffer"].dtype == torch.float64, "as saved_rows"
    assert (found["step"].item(), found["times"]) == (9, 3)
    assert torch.equal(stored.optimizer_states[5][3]["momentum_buffer"], -WEIGHT[:2])
    assert found["step"] is not stored.optimizer_states[5][3]["step"]


def test_files_are_checked_before_memory_is_allocated(checkpoint: SavedCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "c" / "model-2.safetensors").unlink()
    stored = StoredSlices(
        RestoreCommand("a", checkpoint, slices=(StoredSlice(1, "model", "w", 0),)), state_of({1: WEIGHT})
    )
    with pytest.raises(rd.DataLossError, match="model-2.safetensors' is missing"):
        stored.open()
    assert not stored.values


def memory(**options: Any) -> StoredOptimizerState:
    return StoredOptimizerState("adam", 5, 1, "adam", "w", (3,), 0, {}, options)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_is_as_after_load_state_dict_with_the_saved_types(dtype: torch.dtype, fused: bool | None) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    state = {"step": torch.tensor(3.0).double(), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3).double()}
    saved: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    saved["state"][0] = state
    saved["param_groups"][0]["fused"] = fused
    optimizer.load_state_dict(saved)
    expected = optimizer.state[parameter]
    options = {name: value for name, value in saved["param_groups"][0].items() if name != "params"}
    found = loaded_state(memory(**options), state, torch.optim.Adam, dtype)
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0, check_dtype=False)
    assert {name: each.dtype for name, each in found.items()} == {
        **{name: each.dtype for name, each in state.items()},
        "step": expected["step"].dtype,
    }


def test_options_are_as_after_load_state_dict() -> None:
    layer = torch.nn.Linear(2, 1)
    groups: list[dict[str, Any]] = [{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.5}]
    adam = torch.optim.Adam(groups)
    before = copy.deepcopy(adam.state_dict())
    saved = [{"lr": 0.25, "mine": (1, 2), "params": ["weight"]}, {"lr": 0.125, "params": ["bias"]}]
    found = loaded_options("adam", adam, saved)
    assert adam.state_dict() == before
    adam.load_state_dict({"state": {}, "param_groups": [{**group, "params": [n]} for n, group in enumerate(saved)]})
    expected = [{key: each for key, each in group.items() if key != "params"} for group in adam.param_groups]
    assert found == expected
    with pytest.raises(rd.InvalidArgumentError, match=r"saved state of 'adam' must be one that a Adam takes.*groups"):
        loaded_options("adam", adam, saved[:1])


REQUEST = ShardRequest("t", NewFiles(LocalFiles("/tmp/x")), {"model": "model", "adam": "adam"})


def part(number: int, server: int, begin: int, *shape: int) -> PsSlice:
    return PsSlice(number, 1, "w", server, begin, shape, torch.float32)


WEIGHT_SLICES = (part(1, 0, 0, 3, 2), part(2, 1, 3, 2, 2))

BIAS_SLICES = (part(3, 1, 0, 5),)


def test_optimizer_states_are_saved_by_parameter_in_several_files() -> None:
    commands = SaveCommands(REQUEST, 2, max_part_bytes=50)
    commands.add("adam", {"w": WEIGHT_SLICES, "b": BIAS_SLICES}, {}, optimizer=7, size_ratio=2.0)
    (first,) = commands.of(0)[0].files
    second, third = commands.of(1)[0].files
    assert [file.name for file in (first, second, third)] == [f"adam-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [[place.key for place in file.slices] for file in (first, second, third)] == [["w"], ["w"], ["b"]]
    assert {file.optimizer for file in (first, second, third)} == {7}


class TwoSlices:
    def __init__(self) -> None:
        self.values = {1: torch.arange(4.0).reshape(2, 2), 2: torch.zeros(2, 2)}

    def value(self, number: int) -> torch.Tensor:
        return self.values[number]

    def state(self, optimizer: int, number: int) -> Mapping[str, Any]:
        raise AssertionError("no test asks for states")

    def table_state(self, handle: int) -> Mapping[str, Any]:
        raise AssertionError("no test asks for rows")


def two_slices() -> Any:
    return TwoSlices()


@pytest.fixture
def new(tmp_path: Path) -> NewFiles:
    files = directory_files(str(tmp_path / "c"))
    files.make()
    return NewFiles(files)


def report(writer: ServerWriter, token: str) -> Shard:
    writer.close(10.0)
    found = writer.report(token)
    assert isinstance(found, Shard), found
    return found


def test_a_repeated_save_command_is_executed_once(new: NewFiles, tmp_path: Path) -> None:
    writer, held, given = ServerWriter(), two_slices(), torch.ones(2)
    places = (SlicePlace("w", 1, RowRange(2, 4, 6)), SlicePlace("v", 2))
    command = SaveCommand("a", new, (SliceFile("model", 0, "model.safetensors", places, given=("extra",)),))
    writer.begin(command, [given], held)
    held.values[1].zero_()
    given.zero_()
    writer.begin(command, [given], held)
    shard = report(writer, "a")
    found = load_file(tmp_path / "c" / "model.safetensors")
    assert found["w[2:4]"].tolist() == [[0, 1], [2, 3]]
    assert found["extra"].tolist() == [1, 1]
    places_of = shard.files["model", 0].tensors
    assert (places_of["w"].rows, places_of["w"].shape, places_of["v"].rows) == ((2, 4), (6, 2), None)
