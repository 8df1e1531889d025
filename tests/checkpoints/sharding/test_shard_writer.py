"""A replica's half of a save, without replicas: writers of several ranks over equal objects, and reused memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raydist.checkpoints.capture import Capture, CapturedObject, StagingBuffers
from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.object_state import State
from raydist.checkpoints.shards import Shard, ShardRequest, ShardWriter
from raydist.checkpoints.tensor_file import new_files
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


def test_the_copy_is_taken_at_once_and_each_writes_its_share(tmp_path: Path) -> None:
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


def test_what_goes_wrong_is_told_and_raises_nothing_in_the_step(tmp_path: Path) -> None:
    writer = ShardWriter(0, 1, CPU)
    writer.begin(request(tmp_path / "c", bad="bad"), {"bad": Bad()}, {})
    with pytest.raises(ValueError, match=r"bad\.fn|'bad'"):
        raise report(writer, "a")  # type: ignore[misc]  # an exception, as the next line would find out
    lost = request(tmp_path / "d", token="b", model="model")
    (tmp_path / "d").rmdir()
    writer.begin(lost, {"model": torch.nn.Linear(1, 1)}, {})
    assert isinstance(report(writer, "b"), Exception)
    writer.close(10)


def test_only_the_last_saves_are_remembered(tmp_path: Path) -> None:
    writer = ShardWriter(0, 1, CPU)
    for number in range(6):
        writer.begin(request(tmp_path / str(number), str(number)), {"state": State(a=1)}, {})
        report(writer, str(number))
    assert [writer.report(str(number)) is None for number in range(6)] == [True, True, False, False, False, False]
    writer.close(10)


def test_random_states_go_on(tmp_path: Path) -> None:
    writer = ShardWriter(0, 1, CPU)
    writer.begin(request(tmp_path / "c"), {"state": State(a=1)}, {})
    expected = torch.rand(3)
    found = report(writer, "a")
    assert isinstance(found, Shard)
    writer.set_random(found.random)
    assert torch.equal(torch.rand(3), expected)
    writer.close(10)


def capture(**tensors: torch.Tensor) -> Capture:
    return Capture({"model": CapturedObject(SavedObject("module"), tensors)})


def test_memory_is_used_again_where_it_fits() -> None:
    staging = StagingBuffers()
    first = staging.copy_capture(capture(w=torch.ones(3), v=torch.ones(2), gone=torch.ones(1))).objects["model"].tensors
    second = (
        staging.copy_capture(capture(w=torch.zeros(3), v=torch.zeros(2, dtype=torch.int64))).objects["model"].tensors
    )
    assert second["w"].data_ptr() == first["w"].data_ptr()
    assert second["v"].data_ptr() != first["v"].data_ptr()
    assert (second["w"].tolist(), second["v"].tolist()) == ([0, 0, 0], [0, 0])
    assert set(staging._free) == {("model", "w"), ("model", "v")}


def test_parameters_are_copied_without_their_history() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    copied = StagingBuffers().copy_capture(capture(w=parameter)).objects["model"].tensors["w"]
    assert not copied.requires_grad


def test_memory_of_a_share_is_used_again_once_it_is_given_back() -> None:
    staged = StagingBuffers()
    first = staged.copy("model", "w", torch.ones(3))
    second = staged.copy("model", "w", torch.zeros(3))
    assert second.data_ptr() != first.data_ptr()
    assert first.tolist() == [1, 1, 1], "it is being written"
    staged.give_back({("model", "w"): first})
    assert staged.copy("model", "w", torch.zeros(3)).data_ptr() == first.data_ptr()
    assert staged.copy("model", "w", torch.zeros(3)).data_ptr() != first.data_ptr()


def test_only_the_last_share_keeps_its_memory() -> None:
    staged = StagingBuffers()
    copies = {name: staged.copy("model", name, torch.ones(3)) for name in ("w", "v")}
    staged.give_back({("model", "w"): copies["w"]})
    staged.give_back({("model", "v"): copies["v"]})
    assert set(staged._free) == {("model", "v")}
    assert staged.copy("model", "v", torch.ones(4)).shape == (4,)
