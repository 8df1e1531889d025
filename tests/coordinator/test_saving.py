"""Servers write what they have: what they write together is the checkpoint that one process writes."""

from __future__ import annotations

import functools
import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import raydist as rd
from raydist.checkpoints import checkpoint as saving
from raydist.checkpoints import ps_save
from raydist.checkpoints.capture import StagingBuffers
from raydist.checkpoints.checkpoint import contents_of, start_save
from raydist.checkpoints.shards import ShardTerms
from raydist.parameter_servers.slices import FixedShardsPartitioner
from raydist.pipelines.stored.directory_files import directory_files
from tests.coordinator.ps_in_process import (
    Kind,
    LocalStrategy,
    Run,
    Steps,
    adam,
    begun,
    local_strategy,
    momentum,
    opened,
)

GATE = threading.Event()


class Scaled(nn.Module):
    """Something whose state is more than its variables."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        return x * self.factor

    def get_extra_state(self) -> dict[str, Any]:
        return {"doubled": self.factor.detach() * 2, "plain": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state["plain"] == 3


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Scaled(), nn.Linear(8, 3))


class ScaledRun(Run):
    """A run whose module has more in its state than variables."""

    def _make(self, kind: Kind) -> None:
        self.model, self.steps = model_of(), Steps()
        self.optimizer = kind(self.model.parameters())
        self.checkpoint = rd.Checkpoint(model=self.model, optimizer=self.optimizer)

    def inputs(self, number: int) -> tuple[torch.Tensor, ...]:
        return super().inputs(number)[:1]


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "ShardTerms", functools.partial(ShardTerms, small_bytes=0))


def assert_same(found: Path, expected: Path) -> None:
    ours, theirs = opened(found), opened(expected)
    for name in ("model", "optimizer"):
        mine, other = dict(ours.state(name)), dict(theirs.state(name))
        assert mine.pop("param_groups", None) == other.pop("param_groups", None)
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def trained_to_the_gate(here: LocalStrategy) -> Run:
    """A run that has been trained on two batches; what waits at the gate from now on stands still."""
    run = ScaledRun(adam, here)
    run.train(range(2))
    here.coordinator.join()
    GATE.clear()
    return run


@pytest.mark.parametrize(("num_servers", "parts"), [(2, 1), (3, 3)])
def test_it_is_the_checkpoint_of_one_process_of_that_step(
    num_servers: int, parts: int, divided: None, tmp_path: Path
) -> None:
    alone = ScaledRun()
    alone.train(range(3))
    alone.checkpoint.save(tmp_path / "alone")
    with local_strategy(2 if parts == 1 else 1, num_servers, partitioner=FixedShardsPartitioner(parts)) as here:
        run = ScaledRun(adam, here)
        run.train(range(1))
        here.coordinator.join()
        run.train(range(1, 2))
        here.coordinator.join()
        run.train(range(2, 3))
        save = begun(run, tmp_path / "served")
        run.train(range(3, 6))  # behind it: waits for it, and does not count
        save.write()
    assert_same(tmp_path / "served", tmp_path / "alone")
    manifest = opened(tmp_path / "served").manifest
    rows = [place.rows for file in manifest.tensor_files("model") for place in file.tensors.values()]
    assert any(rows) == (parts > 1)
    assert len([file for file in manifest.objects["optimizer"].files if "index" not in file]) == num_servers
    count = len([file for file in manifest.objects["model"].files if "index" not in file])
    assert count == num_servers + 1  # what the module computes for its state is on no server
    restored = ScaledRun()
    restored.checkpoint.restore(tmp_path / "served")
    restored.checkpoint.save(tmp_path / "again")
    assert_same(tmp_path / "again", tmp_path / "alone")


def test_what_is_small_is_one_file_that_torch_loads(tmp_path: Path) -> None:
    with local_strategy(1, 2, partitioner=FixedShardsPartitioner(2)) as here:
        run = ScaledRun(adam, here)
        run.train(range(3))
        begun(run, tmp_path / "served").write()
        here.schedule(len, [])
    alone = ScaledRun()
    alone.train(range(3))
    alone.checkpoint.save(tmp_path / "alone")
    assert_same(tmp_path / "served", tmp_path / "alone")
    assert sorted(each.name for each in (tmp_path / "served").iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
    ]
    found = load_file(tmp_path / "served" / "model.safetensors")
    assert torch.equal(found["0.weight"], opened(tmp_path / "served").state("model")["0.weight"])


def test_a_save_behind_a_step_that_fails_raises_its_error_and_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        _wait()
        raise ArithmeticError("no good")

    with local_strategy(2) as here:
        run = trained_to_the_gate(here)
        here.schedule(fail)
        save = begun(run, tmp_path / "served")
        GATE.set()
        with pytest.raises(ArithmeticError, match="no good"):
            save.write()
        with pytest.raises(ArithmeticError, match="no good"):
            here.coordinator.join()
    assert not (tmp_path / "served").exists()


class Unsavable(nn.Module):
    """Something whose state cannot be told where it is on servers."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def get_extra_state(self) -> None:
        raise ArithmeticError("no state today")


def test_what_fails_on_a_worker_is_the_error_of_its_save_and_steps_go_on(divided: None, tmp_path: Path) -> None:
    with local_strategy(2, 2) as here:
        run = trained_to_the_gate(here)
        with here.mirror.scope():
            unsavable = Unsavable()
        here.schedule(lambda: unsavable.factor.item())
        contents = contents_of(rd.Checkpoint(model=unsavable))
        bad = start_save(contents, directory_files(str(tmp_path / "bad")), {}, staging=StagingBuffers())
        later = [here.schedule(_wait) for _ in range(3)]
        GATE.set()
        with pytest.raises(ArithmeticError, match="no state today"):
            bad.write()
        run.train(range(2, 4))
        here.coordinator.join()
        assert [value.get() for value in later] == [None] * 3
        begun(run, tmp_path / "good").write()
    assert [each.name for each in tmp_path.iterdir()] == ["good"]


def test_a_save_does_not_wait_for_steps_and_they_wait_for_each_other(divided: None, tmp_path: Path) -> None:
    """Neither is anything of a step behind it in a save, nor is one before it missing; with two workers."""
    with local_strategy(2, 2) as here:
        run = trained_to_the_gate(here)
        here.schedule(_wait)
        save = begun(run, tmp_path / "served")  # returns while a step stands still
        later = here.schedule(_wait)
        assert not later._closure.ended
        GATE.set()
        save.write()
        here.coordinator.join()
    assert opened(tmp_path / "served").manifest.objects["model"].files


def _wait() -> None:
    # found, not captured: workers are threads of this process, and an event is not for others
    assert importlib.import_module("tests.coordinator.test_saving").GATE.wait(20)


def test_another_worker_asks_again_where_one_dies(divided: None, tmp_path: Path) -> None:
    with local_strategy(2, 2) as here:
        run = trained_to_the_gate(here)
        values = [here.schedule(_wait) for _ in range(2)]
        save = begun(run, tmp_path / "served")
        here.port.kill(0)
        GATE.set()
        save.write()
        for value in values:
            value.get()
    assert opened(tmp_path / "served").state("model")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("not a tensor")], ids=str)
def test_a_write_that_fails_is_the_error_of_its_save(
    error: Exception, divided: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise error

    with local_strategy(1, 2) as here:
        run = ScaledRun(adam, here)
        run.train(range(1))
        with monkeypatch.context() as patched:
            patched.setattr(ps_save, "write_tensor_file", full)
            save = begun(run, tmp_path / "first")
            with pytest.raises(type(error), match=str(error.args[-1])):
                save.write()
        begun(run, tmp_path / "second").write()
    assert [each.name for each in tmp_path.iterdir()] == ["second"]


def test_rows_of_embeddings_are_saved_by_who_has_them(tmp_path: Path) -> None:
    alone, restored = Run(momentum), Run(momentum, seed=7)
    alone.train(range(3))
    with local_strategy(1, 3) as here:
        run = Run(momentum, here)
        run.train(range(3))
        save = begun(run, tmp_path / "c")
        assert save.shards is not None
        assert list(save.capture.objects) == []  # nothing of it was brought here
        save.write()
    files = opened(tmp_path / "c").manifest.objects["model.embedding_rows"].files
    assert len([file for file in files if "index" not in file]) == 3
    restored.checkpoint.restore(tmp_path / "c")
    torch.testing.assert_close(restored.state(), alone.state(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("consistency", [rd.BoundedStaleness(1), rd.SyncWithBackups(1)])
def test_whatever_workers_wait_for_a_save_has_whole_steps(consistency: Any, divided: None, tmp_path: Path) -> None:
    with local_strategy(2, 2, consistency) as here:
        run = ScaledRun(adam, here)
        run.train(range(5))
        save = begun(run, tmp_path / "served")
        run.train(range(5, 8))
        save.write()
        here.coordinator.join()
    steps = {
        float(entry["step"]) for name, entry in opened(tmp_path / "served").state("optimizer").items() if "." in name
    }
    assert len(steps) == 1  # all parameters have taken the same steps
