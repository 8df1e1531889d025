"""Saves on parameter servers: each server is asked for the slices that it has, copies them and writes them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from raydist.actors.portable_errors import PortableError
from raydist.checkpoints.ps_save import (
    PsSaves,
    SaveCommand,
    SaveCommands,
    SliceFile,
    SlicePlace,
    SliceWriter,
    begin_ps_save,
)
from raydist.checkpoints.shards import Shard, ShardRequest, ShardTerms
from raydist.checkpoints.tensor_file import NewFiles, RowRange
from raydist.parameter_servers.requests import BeginSave
from raydist.parameter_servers.slices import PsSlice
from raydist.parameter_servers.worker.client import Ask
from raydist.pipelines.stored.directory_files import LocalFiles, directory_files

REQUEST = ShardRequest("t", NewFiles(LocalFiles("/tmp/x")), {"model": "model", "adam": "adam"})


def part(number: int, server: int, begin: int, *shape: int) -> PsSlice:
    return PsSlice(number, 1, "w", server, begin, shape, torch.float32)


WEIGHT = (part(1, 0, 0, 3, 2), part(2, 1, 3, 2, 2))
BIAS = (part(3, 1, 0, 5),)
SCALAR = (part(4, 0, 0),)


def test_files_are_numbered_over_all_servers_and_slices_know_their_rows() -> None:
    commands = SaveCommands(REQUEST, 3)
    commands.add("model", {"w": WEIGHT, "b": BIAS, "s": SCALAR}, {"extra": torch.ones(2, 3).T})
    first, second, third = (commands.of(server) for server in range(3))
    assert first[0].files == (
        SliceFile(
            "model", 0, "model-00001-of-00003.safetensors", (SlicePlace("w", 1, RowRange(0, 3, 5)), SlicePlace("s", 4))
        ),
    )
    assert second[0].files == (
        SliceFile(
            "model", 1, "model-00002-of-00003.safetensors", (SlicePlace("w", 2, RowRange(3, 5, 5)), SlicePlace("b", 3))
        ),
    )
    assert third[0].files == (SliceFile("model", 2, "model-00003-of-00003.safetensors", given=("extra",)),)
    assert [len(each[1]) for each in (first, second, third)] == [0, 0, 1]  # to the one that has least to write
    assert third[1][0].is_contiguous()
    assert all(command.token == "t" for command, _ in (first, second, third))
    assert [place.is_first for place in (first[0].files[0].slices[0], second[0].files[0].slices[0])] == [True, False]


def test_what_optimizers_remember_is_asked_for_by_parameter_and_large_files_are_parted() -> None:
    commands = SaveCommands(REQUEST, 2, max_part_bytes=50)
    commands.add("adam", {"w": WEIGHT, "b": BIAS}, {}, optimizer=7, size_ratio=2.0)
    (first,) = commands.of(0)[0].files
    second, third = commands.of(1)[0].files
    assert [file.name for file in (first, second, third)] == [f"adam-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [[place.key for place in file.slices] for file in (first, second, third)] == [["w"], ["w"], ["b"]]
    assert {file.optimizer for file in (first, second, third)} == {7}


def test_one_file_is_called_as_the_object() -> None:
    commands = SaveCommands(REQUEST, 2)
    commands.add("model", {"b": BIAS}, {})
    commands.add("adam", {}, {})
    assert [file.name for file in commands.of(1)[0].files] == ["model.safetensors"]
    assert commands.of(0)[0].files == ()


class Held:
    """Two slices, of which one is remembered."""

    def __init__(self) -> None:
        self.values = {1: torch.arange(4.0).reshape(2, 2), 2: torch.zeros(2, 2)}

    def value(self, number: int) -> torch.Tensor:
        return self.values[number]

    def state(self, optimizer: int, number: int) -> Mapping[str, Any]:
        assert optimizer == 7
        moment = self.values[number] + 10
        return {"step": torch.tensor(3.0), "moment": moment, "flag": True} if number == 1 else {}

    def table_state(self, handle: int) -> Mapping[str, Any]:
        return {"rows": torch.tensor([handle])}


@pytest.fixture
def new(tmp_path: Path) -> NewFiles:
    files = directory_files(str(tmp_path / "c"))
    files.make()
    return NewFiles(files)


def report(writer: SliceWriter, token: str) -> Shard:
    writer.close(10.0)
    found = writer.report(token)
    assert isinstance(found, Shard), found
    return found


def test_values_are_those_of_the_moment_and_an_order_that_comes_again_is_done_once(
    new: NewFiles, tmp_path: Path
) -> None:
    writer, held, given = SliceWriter(), Held(), torch.ones(2)
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


@pytest.mark.parametrize("start", [0, 2])
def test_what_belongs_to_a_whole_parameter_is_told_of_its_first_rows(start: int, new: NewFiles, tmp_path: Path) -> None:
    writer = SliceWriter()
    places = (SlicePlace("w", 1, RowRange(start, start + 2, 6)), SlicePlace("v", 2))
    files = (SliceFile("adam", 0, "adam.safetensors", places, optimizer=7),)
    writer.begin(SaveCommand("a", new, files), [], Held())
    shard = report(writer, "a")
    found = set(load_file(tmp_path / "c" / "adam.safetensors"))
    if start:
        assert found == {"w.moment[2:4]"}
        assert shard.entries == {}
    else:
        assert found == {"w.moment[0:2]", "w.step"}
        entry = {"step": {"$tensor": "w.step"}, "moment": {"$tensor": "w.moment"}, "flag": True}
        assert shard.entries == {"adam": {"w": entry}}


def test_nothing_is_written_where_nothing_is_remembered_and_errors_are_told(new: NewFiles, tmp_path: Path) -> None:
    writer = SliceWriter()
    writer.begin(SaveCommand("a", new, (SliceFile("adam", 0, "x", (SlicePlace("v", 2),), optimizer=7),)), [], Held())
    assert report(writer, "a").files == {}
    assert list((tmp_path / "c").iterdir()) == []
    writer.begin(SaveCommand("b", new, (SliceFile("model", 0, "x", (SlicePlace("w", 99),)),)), [], Held())
    error = writer.report("b")
    assert isinstance(error, PortableError)
    assert isinstance(error.restore(), KeyError)


def test_rows_of_tables_are_told_by_their_entry(new: NewFiles, tmp_path: Path) -> None:
    writer = SliceWriter()
    files = (SliceFile("m.embedding_rows", 1, "rows.safetensors", tables=(("words/1", 4),)),)
    writer.begin(SaveCommand("a", new, files), [], Held())
    shard = report(writer, "a")
    assert shard.entries == {"m.embedding_rows": {"words/1": {"rows": {"$tensor": "words/1.rows"}}}}
    assert load_file(tmp_path / "c" / "rows.safetensors")["words/1.rows"].tolist() == [4]


class Servers:
    """Two, the second one has all weights."""

    num_servers = 2

    def __init__(self) -> None:
        self.asked: dict[int, Ask] = {}
        self.read = 0

    def places(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[PsSlice, ...]]:
        return {
            name: (PsSlice(5, 1, name, 1, 0, tuple(tensor.shape), tensor.dtype),)
            for name, tensor in tensors.items()
            if name.endswith("weight")
        }

    def handle_of(self, obj: torch.optim.Optimizer | torch.Tensor) -> int:
        return 9

    def read_states(self, optimizer: torch.optim.Optimizer) -> None:
        self.read += 1
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter] = {"momentum_buffer": torch.ones_like(parameter)}

    def exchange(self, asks: Mapping[int, Ask]) -> Any:
        self.asked = dict(asks)

    def command(self, server: int) -> SaveCommand:
        request = self.asked[server].request
        assert isinstance(request, BeginSave)
        command: SaveCommand = request.order
        return command


def begun(small_bytes: int) -> tuple[Servers, Shard, torch.optim.Optimizer]:
    servers, model = Servers(), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    stems = {"model": "model", "sgd": "sgd"}
    request = ShardRequest("t", NewFiles(LocalFiles("/tmp/x")), stems, ShardTerms(small_bytes=small_bytes))
    told = begin_ps_save(PsSaves(servers), request, {"model": model, "sgd": optimizer}, {"model": model})
    shard = pickle.loads(told)
    assert isinstance(shard, Shard)
    return servers, shard, optimizer


def test_large_objects_are_asked_for_where_they_are() -> None:
    servers, shard, optimizer = begun(0)
    assert set(servers.asked) == {0, 1}  # each is to say that it is done
    model, state = servers.command(1).files
    assert [place.key for place in model.slices] == ["weight"]
    assert (state.optimizer, [place.key for place in state.slices]) == (9, ["weight"])
    assert [file.given for file in servers.command(0).files] == [("bias",)]
    assert servers.read == 0
    assert shard.objects["sgd"].values["param_groups"][0]["params"] == ["weight", "bias"]
    assert shard.objects["sgd"].class_name == "SGD"
    assert shard.objects["model"].values["bias"] == {"$tensor": "bias"}


def test_small_objects_go_to_one_server_each_and_the_worker_forgets_what_it_read() -> None:
    servers, shard, optimizer = begun(1 << 20)
    files = [*servers.command(0).files, *servers.command(1).files]
    given = {file.owner: set(file.given) for file in files}
    assert given == {"model": {"weight", "bias"}, "sgd": {"weight.momentum_buffer", "bias.momentum_buffer"}}
    assert sum(len(ask.tensors) for ask in servers.asked.values()) == 4
    assert servers.read == 1
    assert not optimizer.state
    assert "weight" in shard.objects["sgd"].values
