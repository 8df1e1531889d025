"""Parts of saves and restores on replicas and parameter servers. tests/coordinator has whole ones with servers."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import raydist as rd
from raydist.actors.portable_errors import PortableError, pack_error
from raydist.checkpoints.capture import Capture, CapturedObject, StagingBuffers
from raydist.checkpoints.checkpoint import contents_of, nodes_of
from raydist.checkpoints.manifest import SavedObject, open_checkpoint
from raydist.checkpoints.object_state import OWNER
from raydist.checkpoints.ps_reader import ServerReader
from raydist.checkpoints.ps_restore import (
    RestoreCommand,
    StoredOptimizerState,
    StoredTable,
    loaded_options,
    loaded_state,
)
from raydist.checkpoints.ps_save import SaveCommands
from raydist.checkpoints.read_tensors import read_pieces
from raydist.checkpoints.shards import DispatchedSave, SaveReports, Shard, ShardRequest, ShardWriter, plan_files
from raydist.checkpoints.tensor_file import NewFiles, new_files
from raydist.core.errors import CancelledError, DeadlineExceededError
from raydist.parameter_servers.row_table import RowTable
from raydist.parameter_servers.slices import PsSlice
from raydist.parameter_servers.table_spec import EmbeddingTableSpec
from raydist.pipelines.stored.directory_files import LocalFiles, directory_files

CPU = torch.device("cpu")


def report(writer: ShardWriter, token: str) -> Shard | Exception:
    end = time.monotonic() + 10
    while (found := writer.report(token)) is None and time.monotonic() < end:
        time.sleep(0.01)
    assert found is not None
    return found


def request(path: Path, token: str = "a", **stems: str) -> ShardRequest:
    return ShardRequest(token, new_files(directory_files(str(path))), stems)


def test_shards_are_copied_at_once_and_written_later(tmp_path: Path) -> None:
    torch.manual_seed(1)
    modules = {name: torch.nn.Linear(8, 8) for name in ("a", "b")}
    asked = request(tmp_path / "c", a="a", b="b")
    before = {name: module.weight.detach().clone() for name, module in modules.items()}
    writers = [ShardWriter(rank, 2, CPU) for rank in range(2)]
    for writer in writers:
        writer.begin(asked, modules, modules)
    with torch.no_grad():
        for module in modules.values():
            module.weight.zero_()
    shards = [report(writer, "a") for writer in writers]
    assert all(isinstance(shard, Shard) for shard in shards)
    assert [sorted(shard.files) for shard in shards if isinstance(shard, Shard)] == [[("a", 0)], [("b", 0)]]
    assert [sorted(shard.objects) for shard in shards if isinstance(shard, Shard)] == [["a", "b"], []]
    for name, weight in before.items():
        assert torch.equal(load_file(tmp_path / "c" / f"{name}.safetensors")["weight"], weight)
    for writer in writers:
        writer.close(10)


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


def test_a_checkpoint_knows_the_nodes_of_its_replicas() -> None:
    owner = SimpleNamespace(shard_saver=SimpleNamespace(nodes=lambda: {"there"}))
    model = type("Owned", (torch.nn.Linear,), {OWNER: owner})(1, 1)
    assert nodes_of(contents_of(rd.Checkpoint(model=model, state=rd.State()))) == {"there"}
    assert nodes_of(contents_of(rd.Checkpoint(state=rd.State()))) == set()


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


def test_reports_are_known_once_the_write_has_ended_and_the_oldest_dropped() -> None:
    reports, go = SaveReports(), threading.Event()

    def write() -> Shard:
        go.wait(10)
        return Shard({}, random=(b"a",))

    def fail() -> Shard:
        raise OSError("disk full")

    reports.write("slow", write)
    reports.write("bad", fail)
    assert reports.of("slow") is None
    go.set()
    reports.close(10.0)
    assert reports.of("slow") == Shard({}, random=(b"a",))
    assert str(reports.of("bad")) == "disk full"
    assert reports.of("another") is None
    for number in range(9):
        reports.record(str(number), Shard({}))
    assert [number for number in range(9) if reports.of(str(number)) is not None] == [5, 6, 7, 8]


class Held:
    """The part of one server: a table."""

    def table(self, handle: int) -> RowTable:
        return RowTable(EmbeddingTableSpec(10, 2, seed=7))


@pytest.fixture
def command(tmp_path: Path) -> RestoreCommand:
    bag = torch.nn.ModuleDict({"words": rd.ShardedEmbedding(10, 2, seed=1)})
    bag["words"](torch.tensor([3, 5, 8]))
    rd.Checkpoint(bag=bag).save(tmp_path / "c")
    checkpoint = open_checkpoint(directory_files(str(tmp_path / "c")))
    return RestoreCommand("a", checkpoint, (StoredTable(4, "bag.embedding_rows", "words"),))


def test_forgotten_restores_stop_reading(command: RestoreCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reader = threading.Event(), ServerReader()
    held: Any = Held()
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


def part(number: int, server: int, begin: int, *shape: int) -> PsSlice:
    return PsSlice(number, 1, "w", server, begin, shape, torch.float32)


def test_optimizer_states_are_saved_by_parameter_in_several_files() -> None:
    request = ShardRequest("t", NewFiles(LocalFiles("/tmp/x")), {"model": "model", "adam": "adam"})
    commands = SaveCommands(request, 2, max_part_bytes=50)
    slices = {"w": (part(1, 0, 0, 3, 2), part(2, 1, 3, 2, 2)), "b": (part(3, 1, 0, 5),)}
    commands.add("adam", slices, {}, optimizer=7, size_ratio=2.0)
    files = [file for server in range(2) for file in commands.of(server)[0].files]
    assert [(file.name, [place.key for place in file.slices], file.optimizer) for file in files] == [
        ("adam-00001-of-00003.safetensors", ["w"], 7),
        ("adam-00002-of-00003.safetensors", ["w"], 7),
        ("adam-00003-of-00003.safetensors", ["b"], 7),
    ]
