"""Checkpoints that are damaged, or hold other entries, shapes and types: nothing is changed on any server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.checkpoints.manifest import SavedCheckpoint
from raydist.coordinator.checkpointing import PsRestorer
from raydist.parameter_servers.slices import FixedShardsPartitioner
from raydist.pipelines.stored.directory_files import directory_files
from tests.coordinator.ps_in_process import served
from tests.coordinator.restored_runs import Net, Run, Saved, adam, assert_same, momentum, saved
from tests.coordinator.test_saving import opened

__all__ = ["saved"]


def damaged(path: Path, file: str, at: int = -3) -> None:
    content = bytearray((path / file).read_bytes())
    content[at] ^= 8
    (path / file).write_bytes(content)


@pytest.mark.parametrize("owner", ["model", "optimizer"])
@pytest.mark.parametrize("where", ["header", "first.weight", "index"])
def test_damage_changes_nothing_on_any_server(
    owner: str, where: str, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = saved(adam, 3, 3)
    name = next(each.name for each in opened(path).files(owner) if ("index" in each.name) == (where == "index"))
    file = next(each for each in opened(path).files(owner) if each.name == name)
    keys = [key for key in file.tensors if key.startswith(where)]
    at = file.tensors[keys[0]].begin if keys else 20
    with served(1, 2, partitioner=FixedShardsPartitioner(2)) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        run.train(range(2))
        before = run.state()
        damaged(path, name, at)
        what = f"tensor '{keys[0]}'" if keys else "its header"
        with pytest.raises(rd.DataLossError, match=rf"{name}.*{what} differs"):
            run.checkpoint.restore(path)
        assert_same(run.state(), before)
        damaged(path, name, at)
        run.checkpoint.restore(path)
        assert_same(run.state(), expected)


class Wider(Net):
    """More than was saved, and less."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(2, 2)
        del self.factor
        self.register_buffer("factor", torch.tensor(1.0), persistent=False)


def test_entries_that_are_there_on_one_side_only(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the driver restores them: with strict=False they stay, else all are listed."""
    path, _ = saved(adam)
    found = []
    for by_driver in (False, True):
        monkeypatch.setattr("tests.coordinator.restored_runs.Net", Wider)
        with served(1, 2, partitioner=FixedShardsPartitioner(2)) as here, monkeypatch.context() as patch:
            if by_driver:
                patch.setattr(PsRestorer, "can_restore", lambda self, obj: False)
            run = Run(adam, here, patch, seed=7)
            run.optimizer.param_groups[0]["eps"] = 0.25
            run.train(range(2))
            before = run.state()
            with pytest.raises(rd.InvalidArgumentError) as caught:
                run.checkpoint.restore(path)
            assert_same(run.state(), before)
            report = run.checkpoint.restore(path, strict=False)
            found.append((run.state(), report, str(caught.value)))
    assert_same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert "model.third.weight" in found[0][1].missing
    assert "model.factor" in found[0][1].unexpected


def edited(path: Path, change: Callable[[SavedCheckpoint], Any]) -> None:
    """Have the manifest say something else of the optimizer."""
    checkpoint = opened(path)
    objects = {**checkpoint.manifest.objects, "optimizer": change(checkpoint)}
    manifest = replace(checkpoint.manifest, objects=objects)
    directory_files(str(path)).replace("manifest.json", manifest.to_bytes())


def test_what_has_another_shape_or_type_is_listed_and_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of what optimizers remember: servers compare that."""
    bare = Run(momentum)
    bare.train(range(3))
    bare.model.first.double()
    bare.model.norm.weight.data = torch.ones(6)
    bare.model.norm.running_mean = torch.ones(6)
    second = bare.model.second.weight
    bare.optimizer.state[second]["momentum_buffer"] = torch.ones(7, 7, dtype=torch.float16)
    bare.optimizer.state[bare.model.tied.bias]["momentum_buffer"] = torch.ones(8)
    bare.checkpoint.save(tmp_path / "c")
    with served(1, 2, partitioner=FixedShardsPartitioner(2)) as here:
        run = Run(momentum, here, monkeypatch, seed=7)
        run.train(range(2))
        before = run.state()
        with pytest.raises(rd.InvalidArgumentError, match="retyped") as caught:
            run.checkpoint.restore(tmp_path / "c")
        for entry in ("first.weight", "first.bias", "norm.weight", "norm.running_mean"):
            assert f"'model.{entry}' is re" in str(caught.value)
        with pytest.raises(rd.InvalidArgumentError) as caught:
            run.checkpoint.restore(tmp_path / "c", only="optimizer")
        message = str(caught.value)
        assert "second.weight.momentum_buffer' is retyped (torch.float32 here, torch.float16 saved)" in message
        assert "tied.bias.momentum_buffer' is reshaped ((7,) here, (8,) saved)" in message
        assert message.count("momentum_buffer") == 2
        assert_same(run.state(), before)


def test_what_can_be_no_state_is_loss(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = saved(adam)
    whole = opened(path).saved("optimizer")
    with served(1, 2) as here:
        run = Run(adam, here, monkeypatch, seed=7)
        run.train(range(2))
        before = run.state()
        entries: list[Any] = [3, [], {"step": {"$tensor": "no"}}, {"step": {"$strange": 3}}]
        for entry in entries:
            values = {**whole.values, "first.weight": entry}
            edited(path, lambda checkpoint, values=values: replace(whole, values=values))  # type: ignore[misc]
            with pytest.raises(rd.DataLossError, match="invalid"):
                run.checkpoint.restore(path)
            assert_same(run.state(), before)
        edited(path, lambda checkpoint: whole)
        run.checkpoint.restore(path)
        assert_same(run.state(), expected)
