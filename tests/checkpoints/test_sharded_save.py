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

import raydist as rd
from raydist.actors.portable_errors import pack_error
from raydist.checkpoints.capture import Capture, CapturedObject, StagingBuffers
from raydist.checkpoints.checkpoint import contents_of, nodes_of
from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.object_state import OWNER
from raydist.checkpoints.ps_restore import StoredOptimizerState, loaded_state
from raydist.checkpoints.shards import DispatchedSave, SaveReports, Shard, ShardRequest, ShardWriter, plan_files
from raydist.checkpoints.tensor_file import new_files
from raydist.core.errors import CancelledError, DeadlineExceededError
from raydist.pipelines.stored.directory_files import directory_files

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
