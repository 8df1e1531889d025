"""Replicas that are killed: another one takes their place, and training goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from raydist.actors.supervision import kill_actors
from tests.conftest import live_actors

pytestmark = pytest.mark.ray

NUM_STEPS, ROWS = 14, 12


@dataclass(frozen=True)
class Kill:
    """A replica that kills itself, once, at a place of a step."""

    place: str
    step: int
    rank: int

    def at(self, place: str, step: int, folder: Path) -> None:
        rank = rd.get_replica_context().replica_id_in_sync_group
        if (place, step, rank) == (self.place, self.step, self.rank):
            flag = folder / f"{place}-{step}-{rank}"
            if not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)


Two = rd.MirroredStrategy | rd.MultiWorkerMirroredStrategy | rd.CentralStorageStrategy


@pytest.fixture
def strategy(ray_cluster: None, request: pytest.FixtureRequest) -> Iterator[Two]:
    make = getattr(request, "param", rd.MirroredStrategy)
    limits = rd.Timeouts(start_s=60, collective_s=15, step_s=60, close_s=5)  # a new replica is slow at first
    options = rd.FailureOptions(recover=True)
    resources = {"CPU": 0.01}
    strategy: Two = make(2, resources_per_replica=resources, timeouts=limits, failure_options=options)
    with strategy:
        yield strategy


@dataclass
class Trained:
    values: dict[str, torch.Tensor]
    losses: list[tuple[float, ...]]
    mean: float
    failures: list[rd.ReplicaFailure]


def same(one: Trained, other: Trained) -> list[str]:
    """Return the names of values that differ."""
    return [name for name, value in one.values.items() if not torch.equal(value, other.values[name])]


MakeStep = Callable[[Callable[[str, int], None]], tuple[nn.Module, list[torch.optim.Optimizer], Any, Any]]


def train(strategy: Two, make: MakeStep, kills: Collection[Kill], folder: Path) -> Trained:
    """Train what `make` makes in the scope: a module, its optimizers, a metric, and a step (batch, number)."""
    folder.mkdir(exist_ok=True)
    before = len(strategy.failures())
    torch.manual_seed(0)
    rows, labels = torch.randn(NUM_STEPS * ROWS, 1, 8, 8), torch.randint(0, 3, (NUM_STEPS * ROWS,))
    data = rd.Dataset.from_tensor_slices((rows, labels)).batch(ROWS)

    def maybe_die(place: str, number: int) -> None:
        for kill in kills:
            kill.at(place, number, folder)

    with strategy.scope():
        model, optimizers, mean, step = make(maybe_die)
        schedules = optimizers if make is convolutions else ()  # the others begin with steps without an update
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.97) for each in schedules]
    losses = []
    for number, batch in enumerate(strategy.distribute_dataset(data)):
        losses.append(strategy.run(step, args=(batch, number)))
        for scheduler in schedulers:
            scheduler.step()  # on the driver, which has sent later steps already when a replica is lost
    values = {name: each.clone() for name, each in model.state_dict().items()}
    for place, optimizer in enumerate(optimizers):
        for number, state in enumerate(optimizer.state.values()):
            values |= {f"{place}.{number}.{name}": torch.as_tensor(each).clone() for name, each in state.items()}
    told = [tuple(map(float, strategy.local_results(loss))) for loss in losses]
    return Trained(values, told, float(mean.compute()), strategy.failures()[before:])


def convolutions(maybe_die: Callable[[str, int], None]) -> Any:
    """Batch norm, dropout, Adam and a metric."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(144, 3)
    )
    optimizer, mean = torch.optim.Adam(model.parameters(), lr=0.01), rd.Mean()

    def step(batch: Any, number: int) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        mean.update(inputs.sum(), weight=len(inputs))
        outputs = model(inputs)
        maybe_die("forward", number)
        loss = F.cross_entropy(outputs, targets)
        loss.backward()
        maybe_die("backward", number)
        optimizer.step()
        maybe_die("update", number)
        return loss.detach()

    return model, [optimizer], mean, step


def accumulation(maybe_die: Callable[[str, int], None]) -> Any:
    """An update after each third step; the gradients of the first two stay on the replica."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    optimizer, mean = torch.optim.Adam(model.parameters(), lr=0.01), rd.Mean()

    def step(batch: Any, number: int) -> torch.Tensor:
        inputs, targets = batch
        mean.update(inputs.sum(), weight=len(inputs))
        loss = F.cross_entropy(model(inputs), targets) / 3
        if number % 3 == 2:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with rd.get_replica_context().no_sync():
                loss.backward()
        maybe_die("end", number)
        return loss.detach()

    return model, [optimizer], mean, step


def two_updates(maybe_die: Callable[[str, int], None]) -> Any:
    """Two models that train in turns, with an exchange after the first update, and one after the second."""
    model = nn.ModuleList([nn.Linear(64, 4), nn.Linear(4, 3)])
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in model]
    mean = rd.Mean()

    def step(batch: Any, number: int) -> torch.Tensor:
        inputs, targets = batch
        mean.update(inputs.sum(), weight=len(inputs))
        for place, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            loss = F.cross_entropy(model[1](model[0](inputs.flatten(1))), targets)
            loss.backward()
            optimizer.step()
            maybe_die(f"update {place}", number)
        total: torch.Tensor = rd.get_replica_context().all_reduce("MEAN", loss.detach())
        return total

    return model, optimizers, mean, step


PROGRAMS = {
    "convolutions": (convolutions, [("forward", 3, 0), ("backward", 6, 1), ("update", 9, 0), ("forward", 12, 1)]),
    "accumulation": (accumulation, [("end", 4, 1), ("end", 9, 0)]),
    "two updates": (two_updates, [("update 0", 3, 1), ("update 1", 8, 0)]),
}


@pytest.mark.timeout(300)
def test_killed_replicas_lose_nothing(two: rd.MirroredStrategy, shared_actors: set[str], tmp_path: Path) -> None:
    check_nothing_is_lost(two, tmp_path, "two updates")
    shared_actors.update(live_actors())  # those that took their place are the strategy's from now on


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (rd.MirroredStrategy, "convolutions"),
        (rd.MirroredStrategy, "accumulation"),
        (rd.MultiWorkerMirroredStrategy, "convolutions"),
    ],
    indirect=["strategy"],
)
def test_replicas_of_other_programs_lose_nothing(strategy: Two, tmp_path: Path, name: str) -> None:
    check_nothing_is_lost(strategy, tmp_path, name)


def make_a_gradient(strategy: Two) -> None:
    """Make a gradient that no optimizer uses."""
    with strategy.scope():
        alone = nn.Linear(1, 1)
    strategy.run(lambda: alone(torch.ones(1, 1)).sum().backward())


def check_nothing_is_lost(strategy: Two, tmp_path: Path, name: str) -> None:
    make, kills = PROGRAMS[name]
    make_a_gradient(strategy)
    undisturbed = train(strategy, make, (), tmp_path / "undisturbed")
    disturbed = train(strategy, make, [Kill(*kill) for kill in kills], tmp_path / "disturbed")
    assert same(disturbed, undisturbed) == []
    assert disturbed.mean == undisturbed.mean
    assert [failure.ranks for failure in disturbed.failures] == [(rank,) for *_, rank in kills]
    lost = sum(failure.num_lost_results for failure in disturbed.failures)
    most = strategy.num_replicas_in_sync * NUM_STEPS
    assert most - lost <= sum(len(told) for told in disturbed.losses) <= most
    for told, those in zip(disturbed.losses, undisturbed.losses, strict=True):
        assert set(told) <= set(those)


class Fragile(nn.Module):
    """A module that kills one replica in its forward pass, once for each number of calls."""

    def __init__(self, folder: Path, calls: Collection[tuple[int, int]]) -> None:
        super().__init__()
        self.folder, self.calls, self.num_calls = folder, calls, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training
        rank = rd.get_replica_context().replica_id_in_sync_group
        flag = self.folder / f"{self.num_calls}-{rank}"
        if (self.num_calls, rank) in self.calls and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x


@pytest.mark.long
@pytest.mark.timeout(180)
def test_fit_goes_on_when_replicas_are_killed(strategy: rd.MirroredStrategy, tmp_path: Path) -> None:
    def fit(*calls: tuple[int, int]) -> tuple[dict[str, torch.Tensor], dict[str, list[float]]]:
        torch.manual_seed(0)
        rows, labels = torch.randn(60, 6), torch.randint(0, 3, (60,))
        with strategy.scope():
            module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), Fragile(tmp_path, calls), nn.Linear(8, 3))
            model = rd.Model(module)
            model.compile(torch.optim.Adam(module.parameters(), lr=0.01), "cross_entropy")
        data = rd.Dataset.from_tensor_slices((rows, labels)).shuffle(60, seed=1).batch(10)
        board = rd.TensorBoard(tmp_path / "board", write_graph=False)
        history = model.fit(data, epochs=3, validation_data=(rows, labels), callbacks=[board], verbose=False).history
        return {name: each.clone() for name, each in module.state_dict().items()}, history

    values, history = fit()
    before = len(strategy.failures())
    with_kills, history_with_kills = fit((4, 1), (11, 0))
    assert [failure.ranks for failure in strategy.failures()[before:]] == [(1,), (0,)]
    assert all(torch.equal(each, with_kills[name]) for name, each in values.items())
    assert history_with_kills == history
    written = [file.read_bytes() for file in (tmp_path / "board").rglob("events*")]
    assert sum(each.count(b"is gone") for each in written) == 2


def widen(number: int) -> np.ndarray[Any, Any]:
    return np.full(3000, number)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("num_input_workers", [0, 2])
def test_a_killed_input_pipeline_is_replaced_and_makes_the_same_batches(
    strategy: rd.MirroredStrategy, num_input_workers: int
) -> None:
    data = rd.Dataset.range(400).shuffle(100, seed=1).map(widen).batch(10)
    options = rd.InputOptions(num_input_workers=num_input_workers)

    def step(batch: torch.Tensor) -> tuple[int, ...]:
        time.sleep(0.02)
        rd.get_replica_context().all_reduce("SUM", 1.0)
        return tuple(batch[:, 0].tolist())

    def read(*kills: int) -> list[tuple[int, ...]]:
        results = []
        for number, batch in enumerate(strategy.distribute_dataset(data, options)):
            results.append(strategy.run(step, args=(batch,)))
            if number in kills:
                kill_actors([strategy._pipelines()._main.actor])
        return [sum(strategy.local_results(each), ()) for each in results]

    assert read(3, 20, 21) == read()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_stopped_replica_is_replaced_and_its_process_ends(strategy: rd.MirroredStrategy) -> None:
    stopped = strategy.run(os.getpid).values[1]
    os.kill(stopped, signal.SIGSTOP)

    def step() -> float:
        return float(rd.get_replica_context().all_reduce("SUM", 1.0))

    assert strategy.run(step).values == (2.0, 2.0)
    assert "does not answer" in strategy.failures()[-1].reason
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, signal.SIGCONT)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_spare_takes_the_place_of_a_killed_replica_and_another_one_gets_ready(ray_cluster: None) -> None:
    def step() -> float:
        return float(rd.get_replica_context().all_reduce("SUM", 1.0))

    options = rd.FailureOptions(recover=True, spares=1)
    with rd.MirroredStrategy(2, resources_per_replica={"CPU": 0.01}, failure_options=options) as strategy:
        for rank in (1, 0):
            spares = strategy._launch()._actors._spares
            assert ray.get([spare.prepare.remote(None) for spare in spares]) == [None]  # it is ready
            expected = spares[0]
            os.kill(strategy.run(os.getpid).values[rank], signal.SIGKILL)
            assert strategy.run(step).values == (2.0, 2.0)
            assert strategy._launch()._actors._handles[rank] is expected
        assert [failure.ranks for failure in strategy.failures()] == [(1,), (0,)]


@pytest.mark.timeout(120)
def test_a_step_whose_message_is_lost_is_not_left_out(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray drops a call to one replica whose arguments are gone; later calls to it go on."""

    def step(number: int) -> float:
        return float(rd.get_replica_context().all_reduce("SUM", float(number)))

    def lose() -> None:
        raise rd.UnavailableError("An argument was lost with its owner.")

    options = rd.FailureOptions(recover=True)
    with rd.MirroredStrategy(2, resources_per_replica={"CPU": 0.01}, failure_options=options) as strategy:
        strategy.run(step, args=(0,))
        actors = strategy._launch()._actors
        send, numbers = actors.send, []

        def send_or_lose(rank: int, message: Any, objects: Any) -> Any:
            numbers.append(rank)
            return ray.remote(lose).remote() if len(numbers) == 4 else send(rank, message, objects)

        monkeypatch.setattr(actors, "send", send_or_lose)
        results = [strategy.run(step, args=(number,)) for number in range(30)]
        assert [each.values for each in results] == [(2.0 * number,) * 2 for number in range(30)]
        assert numbers[3] == 1
        assert [failure.ranks for failure in strategy.failures()] == [()]


@pytest.mark.timeout(120)
def test_a_step_that_always_kills_is_an_error_that_names_it(ray_cluster: None) -> None:
    def step() -> float:
        context = rd.get_replica_context()
        if context.replica_id_in_sync_group == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(context.all_reduce("SUM", 1.0))

    options = rd.FailureOptions(recover=True, attempts_per_step=1)
    with rd.MirroredStrategy(2, resources_per_replica={"CPU": 0.01}, failure_options=options) as strategy:
        strategy.run(int)
        with pytest.raises(rd.UnavailableError, match="replica 1 .* is gone") as caught:
            strategy.local_results(strategy.run(step))
        assert "step 1 has lost replicas 1 times" in "".join(caught.value.__notes__)
        strategy._abort(fetch=False)
