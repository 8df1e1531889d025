"""The driver's end and the replicas' end of a restore, with mirrored objects between them; replicas are threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.checkpoints import read_tensors
from raydist.checkpoints.checkpoint import Checkpoint
from raydist.checkpoints.manifest import open_checkpoint
from raydist.checkpoints.restore import restore_objects
from raydist.checkpoints.shard_reader import ShardReader, exchange_bytes
from raydist.mirroring.replica import MirrorReplica
from raydist.pipelines.stored.directory_files import directory_files
from raydist.replicas.replica_states import RESTORES, ReplicaRestorer
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_ranks
from tests.mirroring.in_process import Mirror

CPU = torch.device("cpu")


def itself(value: Any) -> Any:
    """`value`."""
    return value


def given_alike(replica: MirrorReplica, objects: Mapping[str, Any]) -> None:
    """Do what a replica does after a restore."""
    replica.given_alike(objects.values())


class Restoring(Mirror):
    """A small strategy whose replicas have readers."""

    def __init__(self, num_replicas: int = 2) -> None:
        super().__init__(num_replicas)
        self.asked: list[str] = []
        self._groups: dict[int, LocalGroup] = {}
        for rank, replica in enumerate(self.replicas):
            exchange = functools.partial(self._exchange, rank)
            reader = ShardReader(rank, num_replicas, exchange, functools.partial(given_alike, replica))
            replica.injected.add("restores", functools.partial(itself, reader))
        self.restorer = ReplicaRestorer(self.driver, lambda: True, self._ask)

    def _exchange(self, rank: int, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        group = self._groups[rank]
        exchange_bytes(parts, rank, CPU, lambda tensor, root: group.broadcast(tensor, root).wait())

    def _ask(self, function: Callable[..., bytes], *args: Any) -> Sequence[bytes]:
        payload = self.driver.prepare(function, (RESTORES, *args), injected={"restores": RESTORES})
        self.driver.dispatched()
        self.asked.append(function.__name__)
        calls = []
        for rank, replica in enumerate(self.replicas):
            with self._class_trackers[rank].swapped():
                calls.append(replica.apply(payload, []))

        def body(group: LocalGroup) -> bytes:
            self._groups[group.rank] = group
            fn, given, named = calls[group.rank]
            told: bytes = fn(*given, **named)
            return told

        return run_ranks(len(calls), body)

    def restore(self, path: Path, **objects: Any) -> None:
        restore_objects(objects, objects, open_checkpoint(directory_files(str(path))), True, True, [self.restorer])


class Net(nn.Module):
    """Statistics that replicas add up, and such as they take the mean of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("rows", torch.zeros(()))
        rd.set_aggregation(self, "rows", synchronization="on_read", aggregation="sum")


def made(scope: Any, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    with scope:
        model = Net()
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1 * seed)}


def step_of(objects: dict[str, Any]) -> Callable[[], None]:
    model, optimizer = objects["model"], objects["optimizer"]

    def step() -> None:
        optimizer.zero_grad()
        model.rows.add_(1)
        model.norm(model.linear(torch.ones(3, 2) * torch.arange(3.0)[:, None])).pow(3).sum().backward()
        optimizer.step()

    return step


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    mirror = Restoring()
    objects = made(mirror.scope(), 1)
    mirror.run(step_of(objects))
    Checkpoint(**objects).save(tmp_path / "c")
    mirror.driver.release()
    return tmp_path / "c", objects


@pytest.fixture
def read_by_driver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the reads of files with tensors by the driver's thread."""
    found: list[str] = []
    original = read_tensors._FileReader._read_piece

    def some(self: Any, size: int, what: str) -> bytes:
        if threading.current_thread() is threading.main_thread():
            found.append(what)
        return original(self, size, what)

    monkeypatch.setattr(read_tensors._FileReader, "_read_piece", some)
    return found


def values(objects: dict[str, Any]) -> list[Any]:
    model, optimizer = objects["model"], objects["optimizer"]
    state = optimizer.state_dict()
    tensors = [*model.state_dict().values(), *(each for part in state["state"].values() for each in part.values())]
    return [*(tensor.tolist() for tensor in tensors), state["param_groups"][0]["lr"]]


@pytest.mark.parametrize(("num_steps", "num_replicas"), [(0, 3), (2, 1)])
def test_replicas_read_and_the_driver_sees_it(
    num_steps: int, num_replicas: int, saved: tuple[Path, dict[str, Any]], read_by_driver: list[str]
) -> None:
    """Also where no step has used the objects yet: so a program begins that goes on."""
    path, before = saved
    mirror = Restoring(num_replicas)
    objects = made(mirror.scope(), 2)
    for _ in range(num_steps):
        mirror.run(step_of(objects))
    held = objects["optimizer"].param_groups
    mirror.restore(path, **objects)
    assert read_by_driver == []
    assert mirror.asked == ["prepare_shard", "commit_shard"]
    assert values(objects) == values(before)
    assert held[0]["lr"] == 0.1
    for one in (objects, before):
        step = step_of(one)
        mirror.run(step) if one is objects else step()
    found, expected = objects["model"].state_dict(), before["model"].state_dict()
    torch.testing.assert_close(found["linear.weight"], expected["linear.weight"])
    assert found["rows"] == 2 + num_replicas, "what replicas add up is there once"


def test_what_the_program_wrote_before_is_overwritten(saved: tuple[Path, dict[str, Any]]) -> None:
    path, before = saved
    mirror = Restoring()
    objects = made(mirror.scope(), 2)
    mirror.run(step_of(objects))
    view = objects["model"].linear.weight.detach().numpy()
    view[:] = 7.0
    objects["optimizer"].param_groups[0]["lr"] = 3.0
    mirror.restore(path, **objects)
    assert values(objects) == values(before)
    with torch.no_grad():
        objects["model"].linear.weight.zero_()
    mirror.run(step_of({**objects}))
    assert objects["model"].linear.weight.abs().max() <= 0.11, "what it writes later counts"


def noted(*args: Any) -> None:
    """A hook of the program's."""


def test_the_driver_restores_what_replicas_cannot(tmp_path: Path, read_by_driver: list[str]) -> None:
    mirror = Restoring()

    def not_made_here(model: nn.Sequential) -> None:
        model.append(nn.Linear(2, 2))

    def hooked(model: nn.Sequential) -> None:
        model.register_load_state_dict_post_hook(noted)

    def with_a_metric(model: nn.Module) -> None:
        with mirror.scope():
            model.mean = rd.Mean()

    for change in (not_made_here, hooked, with_a_metric):
        with mirror.scope():
            layer = nn.Linear(2, 2)
            model = nn.Sequential(layer)
        change(model)
        path = tmp_path / change.__name__
        Checkpoint(model=model).save(path)
        expected = layer.weight.tolist()
        with torch.no_grad():
            layer.weight.zero_()
        read_by_driver.clear()
        mirror.restore(path, model=model)
        assert read_by_driver, change.__name__
        assert mirror.asked == []
        assert layer.weight.tolist() == expected
