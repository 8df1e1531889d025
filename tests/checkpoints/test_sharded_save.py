"""A save in parts: what replicas write and what the driver writes becomes one checkpoint, as one process writes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from raydist.actors.portable_errors import pack_error
from raydist.checkpoints.capture import Capture, CapturedObject, StagingBuffers
from raydist.checkpoints.checkpoint import Checkpoint, contents_of, nodes_of, start_save
from raydist.checkpoints.manifest import SavedObject, open_checkpoint
from raydist.checkpoints.object_state import OWNER, State
from raydist.checkpoints.random_state import RESTORED_REPLICAS
from raydist.checkpoints.shards import (
    DispatchedSave,
    SaveReports,
    Shard,
    ShardRequest,
    ShardWriter,
    plan_files,
)
from raydist.checkpoints.tensor_file import new_files
from raydist.core.errors import CancelledError, DeadlineExceededError
from raydist.pipelines.stored.directory_files import directory_files


class Saver:
    """Two replicas in this process."""

    def __init__(self) -> None:
        self.writers = [ShardWriter(rank, 2, torch.device("cpu")) for rank in range(2)]
        self.names: list[str] = []
        self.lost = False

    @property
    def shard_saver(self) -> Saver:
        return self

    def save_mode(self, obj: Any) -> Literal["divided", "whole"] | None:
        return None if isinstance(obj, torch.nn.BatchNorm1d) else "divided"

    def nodes(self) -> set[str]:
        return {"there"}

    def begin(self, request: ShardRequest, objects: Mapping[str, Any], modules: Mapping[str, torch.nn.Module]) -> Saver:
        self.names, self.request = list(objects), request
        for writer in self.writers:
            writer.begin(request, objects, modules)
        return self

    def wait(self) -> Sequence[Shard]:
        if self.lost:
            raise ConnectionError("replica 1 is gone")
        for writer in self.writers:
            writer.close(10)
        found = [writer.report(self.request.token) for writer in self.writers]
        assert all(isinstance(shard, Shard) for shard in found), found
        return [shard for shard in found if isinstance(shard, Shard)]


def owned(cls: Any, saver: Saver) -> Any:
    return type(cls)(cls.__name__, (cls,), {OWNER: saver})


def objects(saver: Saver) -> dict[str, Any]:
    model = owned(torch.nn.Linear, saver)(3, 2)
    optimizer = owned(torch.optim.Adam, saver)(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    norm = owned(torch.nn.BatchNorm1d, saver)(2)
    return {"progress": State(a=1), "model": model, "again": model, "optimizer": optimizer, "norm": norm}


def test_a_divided_save_equals_that_of_one_process(tmp_path: Path) -> None:
    saver = Saver()
    checkpoint = Checkpoint(**objects(saver))
    directory = directory_files(str(tmp_path / "c"))
    started = start_save(contents_of(checkpoint), directory, {"mine": 1}, staging=StagingBuffers())
    started.write()
    assert saver.names == ["model", "optimizer"]
    assert nodes_of(contents_of(checkpoint)) == {"there"}
    assert nodes_of(contents_of(Checkpoint(state=State()))) == set()
    found = open_checkpoint(directory).manifest
    assert list(found.objects) == ["progress", "model", "again", "optimizer", "norm"]
    assert found.objects["again"].same_as == "model"
    assert found.details == {"mine": 1}
    other = Checkpoint(**objects(Saver()))
    count = RESTORED_REPLICAS.count
    other.restore(tmp_path / "c")
    assert len(RESTORED_REPLICAS.since(count)) == 2
    assert RESTORED_REPLICAS.since(RESTORED_REPLICAS.count) == ()
    states = [contents_of(each).capture().objects for each in (checkpoint, other)]
    for name in ("model", "optimizer", "norm"):
        first, second = (each[name] for each in states)
        assert first.saved.values == second.saved.values
        assert all(torch.equal(value, second.tensors[key]) for key, value in first.tensors.items())


def test_a_failed_replica_leaves_no_checkpoint(tmp_path: Path) -> None:
    saver = Saver()
    saver.lost = True
    started = start_save(
        contents_of(Checkpoint(**objects(saver))), directory_files(str(tmp_path / "c")), {}, staging=StagingBuffers()
    )
    for writer in saver.writers:
        writer.close(10)
    with pytest.raises(ConnectionError, match="replica 1"):
        started.write()
    assert list(tmp_path.iterdir()) == []


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


def capture(**tensors: torch.Tensor) -> Capture:
    return Capture({"model": CapturedObject(SavedObject("module"), tensors)})


def test_memory_of_copies_is_reused_if_it_fits() -> None:
    staging = StagingBuffers()
    first = staging.copy_capture(capture(w=torch.ones(3), v=torch.ones(2), gone=torch.ones(1))).objects["model"].tensors
    second = (
        staging.copy_capture(capture(w=torch.zeros(3), v=torch.zeros(2, dtype=torch.int64))).objects["model"].tensors
    )
    assert second["w"].data_ptr() == first["w"].data_ptr()
    assert second["v"].data_ptr() != first["v"].data_ptr()
    assert (second["w"].tolist(), second["v"].tolist()) == ([0, 0, 0], [0, 0])
    assert set(staging._free) == {("model", "w"), ("model", "v")}


def test_memory_of_a_shard_is_reused_after_its_write() -> None:
    staged = StagingBuffers()
    first = staged.copy("model", "w", torch.ones(3))
    second = staged.copy("model", "w", torch.zeros(3))
    assert second.data_ptr() != first.data_ptr()
    assert first.tolist() == [1, 1, 1], "it is being written"
    staged.give_back({("model", "w"): first})
    assert staged.copy("model", "w", torch.zeros(3)).data_ptr() == first.data_ptr()
    assert staged.copy("model", "w", torch.zeros(3)).data_ptr() != first.data_ptr()


MIB = 1 << 20


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_every_tensor_is_in_one_file_and_large_objects_are_divided_evenly(num_replicas: int) -> None:
    sizes = {"model": {f"w{n}": 4 * MIB for n in range(64)}, "small": {"a": 1, "b": 2}, "none": {}}
    files = plan_files(sizes, num_replicas)
    keys = [(file.owner, key) for file in files for key in file.keys]
    assert sorted(keys) == sorted((owner, key) for owner, tensors in sizes.items() for key in tensors)
    load = [0] * num_replicas
    for file in files:
        load[file.rank] += sum(sizes[file.owner][key] for key in file.keys)
    assert max(load) - min(load) <= 8 * MIB
    assert [file.count for file in files if file.owner == "small"] == [1]
    (count,) = {file.count for file in files if file.owner == "model"}
    assert num_replicas <= count <= num_replicas + 1


def test_undivided_objects_belong_to_the_first_replica() -> None:
    files = plan_files({"a": {"w": 9}, "b": {"w": 40 * MIB, "v": 40 * MIB}}, 3, whole={"b"}, max_part_bytes=50 * MIB)
    assert [(file.owner, file.number, file.count, file.rank) for file in files] == [
        ("a", 0, 1, 0),
        ("b", 0, 2, 0),
        ("b", 1, 2, 0),
    ]


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


def test_a_save_waits_for_all_shards() -> None:
    group = Group([None, None], [Shard({}), None], [Shard({}), Shard({})])
    waiting = save(group)
    assert not waiting.is_done
    assert waiting.wait() == [Shard({}), Shard({})]
    assert waiting.is_done
    assert group.num_asked == 3


def test_the_error_that_caused_the_others_is_raised() -> None:
    consequence, cause = pack_error(CancelledError("given up")), pack_error(ValueError("bad row"))
    with pytest.raises(ValueError, match="bad row"):
        save(Group([consequence, None], [consequence, cause])).wait()
    with pytest.raises(CancelledError, match="given up"):
        save(Group([consequence, Shard({})])).wait()


def test_a_wait_has_a_limit() -> None:
    with pytest.raises(DeadlineExceededError, match=r"within 0\.01 s, but 1 of 2 replicas have not"):
        save(Group([None, Shard({})]), 0.01).wait()


def test_reports_are_known_once_the_write_has_ended() -> None:
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


def test_the_oldest_reports_are_dropped() -> None:
    reports = SaveReports()
    for number in range(9):
        reports.record(str(number), Shard({}))
    assert [number for number in range(9) if reports.of(str(number)) is not None] == [5, 6, 7, 8]
