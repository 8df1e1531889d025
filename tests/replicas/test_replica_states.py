"""Restores by replicas beside writes of the program, and those that the driver makes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.replicas.replica_states import ReplicaRestorer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


class Net(nn.Module):
    """Statistics that replicas add up, and such as they take the mean of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("rows", torch.zeros(()))
        rd.set_aggregation(self, "rows", synchronization="on_read", aggregation="sum")


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the objects that replicas restored, beside the global step, which is in every checkpoint."""
    found: list[str] = []
    original = ReplicaRestorer.commit

    def commit(self: ReplicaRestorer, token: str, objects: dict[str, Any], modules: Any) -> None:
        found.extend(name for name in objects if name != "global_step")
        original(self, token, objects, modules)

    monkeypatch.setattr(ReplicaRestorer, "commit", commit)
    return found


def test_what_the_program_wrote_before_is_overwritten(
    two: rd.MirroredStrategy, tmp_path: Path, committed: list[str]
) -> None:
    with two.scope():
        model: Any = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model.rows.add_(1)
        model.norm(model.linear(torch.ones(3, 2) * torch.arange(3.0)[:, None])).pow(3).sum().backward()
        optimizer.step()

    def values() -> list[Any]:
        state = optimizer.state_dict()
        tensors = [*model.state_dict().values(), *(each for part in state["state"].values() for each in part.values())]
        return [*(tensor.tolist() for tensor in tensors), state["param_groups"][0]["lr"]]

    two.run(step)
    checkpoint = rd.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.save(tmp_path / "c")
    saved, group = values(), optimizer.param_groups[0]
    model.linear.weight.detach().numpy()[:] = 7.0
    group["lr"] = 3.0
    checkpoint.restore(tmp_path / "c")
    assert sorted(committed) == ["model", "optimizer"]
    assert values() == saved
    assert group["lr"] == 0.1
    with torch.no_grad():
        model.linear.weight.zero_()
    two.run(step)
    assert model.linear.weight.abs().max() <= 0.11, "what it writes later counts"
    assert model.rows == 4, "what replicas add up is there once"


def noted(*args: Any) -> None:
    """A hook of the program's."""


def test_the_driver_restores_what_replicas_cannot(
    two: rd.MirroredStrategy, tmp_path: Path, committed: list[str]
) -> None:
    def not_made_here(model: nn.Sequential) -> None:
        model.append(nn.Linear(2, 2))

    def hooked(model: nn.Sequential) -> None:
        model.register_load_state_dict_post_hook(noted)

    def with_a_metric(model: nn.Module) -> None:
        with two.scope():
            model.mean = rd.Mean()

    for change in (not_made_here, hooked, with_a_metric):
        with two.scope():
            layer = nn.Linear(2, 2)
            model = nn.Sequential(layer)
        change(model)
        checkpoint = rd.Checkpoint(model=model)
        checkpoint.save(tmp_path / change.__name__)
        expected = layer.weight.tolist()
        with torch.no_grad():
            layer.weight.zero_()
        checkpoint.restore(tmp_path / change.__name__)
        assert not committed, change.__name__
        assert layer.weight.tolist() == expected
