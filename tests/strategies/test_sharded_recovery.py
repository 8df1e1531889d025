"""Replicas that hold parts of parameters are killed, and steps fail: all start again from copies; nothing is lost."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import raydist as rd
from raydist import testing
from raydist.mirroring.blueprints import StateOfParts
from raydist.replicas import state_copies
from raydist.testing import strategy_contract as contract

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

Divided = rd.ShardedStrategy | rd.MeshStrategy | rd.PipelineStrategy

NUM_STEPS, ROWS = 14, 9
SETTINGS: dict[str, Any] = {
    "timeouts": rd.Timeouts(start_s=60, collective_s=15, step_s=60, close_s=5),
    "resources_per_replica": {"CPU": 0.01},
    "failure_options": rd.FailureOptions(recover=True),
}


class Net(nn.Module):
    """Layers that can be divided along a mesh, batch statistics, and random masks; a width that `divide` changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(10, 8), nn.Linear(8, 3)
        self.width = 8
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.num_calls += 1
        hidden = self.up(self.drop(self.norm(self.first(x)))).unflatten(1, (self.width // 2, 2))
        return self.down(hidden.relu().flatten(1))


def divide(model: Any, mesh: Any) -> None:
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.width //= mesh["tensor"].size()


MAKERS: dict[str, Callable[[], Divided]] = {
    "two": lambda: rd.ShardedStrategy(2, 1, **SETTINGS),
    "two by two": lambda: rd.ShardedStrategy(4, 1, shard_size=2, **SETTINGS),
    "tensor": lambda: rd.MeshStrategy({"tensor": 2}, divide, **SETTINGS),
    "stages": lambda: rd.PipelineStrategy(2, num_microbatches=3, split=["up"], **SETTINGS),
}


@pytest.fixture
def strategy(ray_cluster: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Divided]:
    monkeypatch.setattr(state_copies, "_MOST_STEPS", 3)  # so that a test passes several copies
    made = MAKERS[request.param]()
    with made:
        yield made


@dataclass(frozen=True)
class Fault:
    """A replica that kills itself, or fails, once, at a place of a step."""

    place: str
    step: int
    rank: int
    fails: bool = False

    def at(self, place: str, step: int, folder: Path) -> None:
        if (place, step, torch.distributed.get_rank()) != (self.place, self.step, self.rank):
            return
        flag = folder / f"{place}-{step}-{self.rank}"
        if not flag.exists():
            flag.touch()
            if self.fails:
                raise RuntimeError(f"a fault in step {step}")
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Meeting:
    """Places of a step at which faults are met."""

    faults: tuple[Fault, ...]
    folder: Path

    def __call__(self, place: str, step: int) -> None:
        for fault in self.faults:
            fault.at(place, step, self.folder)

    def loss(self, step: int, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self("forward", step)
        if any(fault.place == "in backward" for fault in self.faults):
            outputs.register_hook(lambda gradient: self("in backward", step))
        return F.cross_entropy(outputs, targets)


def loss_of(model: nn.Module, inputs: Any, targets: Any, loss_fn: Callable[..., Any], *, in_stages: bool) -> Any:
    """Compute the loss and its gradients."""
    if in_stages:
        return rd.get_replica_context().pipeline_step((inputs, targets), loss_fn, model)
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    return loss


@dataclass
class Trained:
    values: dict[str, torch.Tensor]
    losses: list[tuple[float, ...]]
    mean: float
    seen: list[float]
    num_calls: int


def kill_between_steps(strategy: Divided, faults: Collection[Fault], step: int) -> None:
    for fault in faults:
        if (fault.place, fault.step) == ("between steps", step):
            os.kill(strategy.local_results(strategy.run(lambda: int(os.getpid())))[fault.rank], signal.SIGKILL)


def train(strategy: Divided, faults: Collection[Fault], folder: Path, *, skip: Collection[int] = ()) -> Trained:
    """Train all steps but those in `skip`; go on after a step that fails."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    rows, labels = torch.randn(NUM_STEPS * ROWS, 6), torch.randint(0, 3, (NUM_STEPS * ROWS,))
    data = rd.Dataset.from_tensor_slices((rows, labels)).batch(ROWS)
    with strategy.scope():
        model = Net()
        optimizer, mean = torch.optim.AdamW(model.parameters(), lr=0.01), rd.Mean()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.97)

    meet = Meeting(tuple(faults), folder)
    in_stages = isinstance(strategy, rd.PipelineStrategy)

    def step(batch: Any, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = batch
        optimizer.zero_grad()
        mean.update(inputs.sum(), weight=len(inputs))
        loss = loss_of(model, inputs, targets, partial(meet.loss, number), in_stages=in_stages)
        meet("backward", number)
        optimizer.step()
        meet("update", number)
        return loss.detach(), inputs.double().sum()

    failing = {fault.step for fault in faults if fault.fails}
    results = []
    for number, batch in filter(lambda each: each[0] not in skip, enumerate(strategy.distribute_dataset(data))):
        if number in failing:  # with one replica in sync, `run` itself raises the error
            with pytest.raises(RuntimeError, match=f"a fault in step {number}"):
                strategy.local_results(strategy.run(step, args=(batch, number))[0])
            continue
        results.append(strategy.run(step, args=(batch, number)))
        kill_between_steps(strategy, faults, number)
        scheduler.step()  # on the driver, which may have sent later steps already when a replica is lost
    values = {name: each.clone() for name, each in model.state_dict().items()}
    for number, state in enumerate(optimizer.state.values()):
        values |= {f"{number}.{name}": torch.as_tensor(each).clone() for name, each in state.items()}
    values |= {"lr": torch.tensor(optimizer.param_groups[0]["lr"])}
    losses = [tuple(map(float, strategy.local_results(loss))) for loss, _ in results]
    seen = [sum(map(float, strategy.local_results(each))) for _, each in results]
    return Trained(values, losses, float(mean.compute()), seen, model.num_calls)


KILLS = [("forward", 3, 0), ("in backward", 6, 1), ("between steps", 8, 1), ("update", 10, 0), ("backward", 12, 1)]


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        ("two", KILLS),
        ("stages", [("forward", 3, 1), KILLS[1], KILLS[3]]),
        pytest.param("tensor", [KILLS[1], KILLS[3]], marks=pytest.mark.long),
        pytest.param(
            "two by two", [("forward", 5, 3), ("in backward", 6, 2), ("update", 10, 1)], marks=pytest.mark.long
        ),
    ],
    indirect=["strategy"],
)
def test_killed_replicas_lose_nothing(strategy: Divided, kills: list[tuple[str, int, int]], tmp_path: Path) -> None:
    undisturbed = train(strategy, (), tmp_path / "undisturbed")
    disturbed = train(strategy, [Fault(*kill) for kill in kills], tmp_path / "disturbed")
    assert differing(disturbed, undisturbed) == []
    assert [failure.ranks for failure in strategy.failures()] == [(rank,) for *_, rank in kills]
    assert all(failure.step > 0 for failure in strategy.failures()[1:]), "from a copy, and not from the beginning"


def differing(one: Trained, other: Trained) -> list[str]:
    """Return the names of what differs."""
    assert one.values.keys() == other.values.keys()
    found = [name for name, each in one.values.items() if not torch.equal(each, other.values[name])]
    return found + [
        name for name in ("losses", "seen", "mean", "num_calls") if getattr(one, name) != getattr(other, name)
    ]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["two"], indirect=True)
def test_replicas_killed_at_random_moments_lose_nothing(strategy: Divided, tmp_path: Path) -> None:
    undisturbed = train(strategy, (), tmp_path / "undisturbed")
    steps = strategy._headers.count  # of this strategy so far
    plan = testing.FaultPlan(*(testing.Fault(steps + number, rank=number % 2) for number in (1, 4, 6, 9, 11, 13)))
    plan.arm(strategy)
    assert differing(train(strategy, (), tmp_path / "disturbed"), undisturbed) == []
    assert 4 <= len(strategy.failures()) <= 6


@pytest.mark.parametrize("strategy", ["two", pytest.param("tensor", marks=pytest.mark.long)], indirect=True)
def test_a_failed_step_does_not_count_and_training_goes_on(strategy: Divided, tmp_path: Path) -> None:
    faults = [Fault("forward", 4, 0, fails=True), Fault("in backward", 8, 1, fails=True), Fault("forward", 9, 1)]
    expected = train(strategy, (), tmp_path / "without", skip=(4, 8))
    found = train(strategy, faults, tmp_path / "failed")
    assert differing(found, expected) == []
    assert [failure.ranks for failure in strategy.failures()] == [(1,)]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["two"], indirect=True)
def test_errors_are_those_of_other_strategies(strategy: Divided) -> None:
    (check,) = (each for each in contract.CHECKS if each.__name__ == "check_errors")
    check(strategy)


def test_what_cannot_be_sharded_is_an_error_and_training_goes_on(ray_cluster: None) -> None:
    with MAKERS["two"]() as strategy:
        with strategy.scope():
            model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        strategy.run(step)
        before = model.weight.detach().clone()
        with strategy.scope():
            other = torch.optim.LBFGS(model.parameters())
        with pytest.raises(rd.InvalidArgumentError, match="LBFGS needs whole tensors"):
            strategy.local_results(strategy.run(lambda: len(other.param_groups)))
        assert torch.equal(model.weight, before)
        strategy.run(step)
        torch.testing.assert_close(model.weight.detach(), before - 0.5)


class Fragile(nn.Module):
    """A module that meets faults in its forward pass, at numbers of calls."""

    def __init__(self, folder: Path, faults: Collection[Fault]) -> None:
        super().__init__()
        self.folder, self.faults, self.num_calls = folder, faults, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += self.training
        for fault in self.faults:
            fault.at("fit", self.num_calls, self.folder)
        return x


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["two", "stages"], indirect=True)
def test_fit_goes_on_when_replicas_are_killed(strategy: Divided, tmp_path: Path) -> None:
    def fit(*faults: Fault) -> tuple[dict[str, torch.Tensor], dict[str, list[float]]]:
        torch.manual_seed(0)
        rows, labels = torch.randn(60, 6), torch.randint(0, 3, (60,))
        with strategy.scope():
            module = nn.Sequential()
            module.add_module("down", nn.Linear(6, 8))
            module.add_module("drop", nn.Dropout(0.3))
            module.add_module("fragile", Fragile(tmp_path, faults))
            module.add_module("up", nn.Linear(8, 3))
            model = rd.Model(module)
            model.compile(torch.optim.Adam(module.parameters(), lr=0.01), "cross_entropy")
        data = rd.Dataset.from_tensor_slices((rows, labels)).shuffle(60, seed=1).batch(10)
        history = model.fit(data, epochs=3, validation_data=(rows, labels), verbose=False).history
        return {key: each.clone() for key, each in module.state_dict().items()}, history

    values, history = fit()
    again, history_again = fit(Fault("fit", 4, 1), Fault("fit", 11, 0))
    assert [failure.ranks for failure in strategy.failures()] == [(1,), (0,)]
    assert [key for key, each in values.items() if not torch.equal(each, again[key])] == []
    assert history_again == history


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["two"], indirect=True)
def test_checkpoints_before_and_after_a_loss(strategy: Divided, tmp_path: Path) -> None:
    """A checkpoint between the last copy and the loss stays whole, and one can be restored afterwards."""
    fault = Fault("forward", 4, 1)
    with strategy.scope():
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        rd.materialize(model, seed=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        outputs = model(torch.arange(12.0).reshape(3, 4).sin())
        fault.at("forward", number, tmp_path)
        outputs.square().mean().backward()
        optimizer.step()

    checkpoint = rd.Checkpoint(model=model, optimizer=optimizer)
    manager = rd.CheckpointManager(checkpoint, tmp_path / "saved", None, asynchronous=False)
    for number in range(7):
        strategy.run(step, args=(number,))
        if number == 3:
            manager.save()
            values = {name: each.clone() for name, each in model.state_dict().items()}
            files = {path: path.stat().st_mtime_ns for path in (tmp_path / "saved").rglob("*.safetensors")}
    after = {name: each.clone() for name, each in model.state_dict().items()}
    assert [failure.ranks for failure in strategy.failures()] == [(1,)]
    assert {path: path.stat().st_mtime_ns for path in files} == files, "a save that is done does not run again"
    manager.restore_or_initialize()
    assert all(torch.equal(each, values[name]) for name, each in model.state_dict().items())
    for number in range(4, 7):
        strategy.run(step, args=(number,))
    assert all(torch.equal(each, after[name]) for name, each in model.state_dict().items())
    manager.close()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["two"], indirect=True)
def test_a_loop_in_the_replicas_runs_again(strategy: Divided, tmp_path: Path) -> None:
    def train(folder: Path, *faults: Fault) -> tuple[torch.Tensor, list[Any]]:
        folder.mkdir()
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def loop(batches: Any, most: int, part: int) -> float:
            total = 0.0
            for number, batch in enumerate(itertools.islice(batches, most)):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                for fault in faults:
                    fault.at(f"part {part}", number, folder)
                optimizer.step()
                total += float(batch.double().sum())
            return total

        sums = []
        iterator = iter(strategy.distribute_dataset(rd.Dataset.from_tensor_slices(torch.randn(60, 4)).batch(5)))
        for part, most in enumerate((2, 3, 3, 99)):
            found = strategy.run(loop, args=(iterator, most, part))
            if any(fault.fails and fault.place == f"part {part}" for fault in faults):
                with pytest.raises(RuntimeError, match="a fault in step"):
                    strategy.local_results(found)
                found = strategy.run(loop, args=(iterator, most, part))  # from the beginning
            sums.append(found)
        return model.get_parameter("0.weight").detach().clone(), [strategy.local_results(each) for each in sums]

    weight, sums = train(tmp_path / "undisturbed")
    for number, fails in enumerate((False, True)):
        faults = Fault("part 1", 1, 1, fails), Fault("part 3", 2, 0, fails)
        again, sums_again = train(tmp_path / f"disturbed {number}", *faults)
        assert sums_again == sums
        assert torch.equal(again, weight)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["two"], indirect=True)
def test_a_stopped_replica_is_replaced(strategy: Divided, tmp_path: Path) -> None:
    with strategy.scope():
        model = nn.Linear(2, 2)
    for number in range(3):
        pids = strategy.local_results(strategy.run(lambda: (os.getpid(), float(model(torch.ones(1, 2)).sum()))[0]))
        if number == 1:
            os.kill(pids[1], signal.SIGSTOP)
    assert [failure.ranks for failure in strategy.failures()] == [(1,)]
    assert "does not answer" in strategy.failures()[0].reason


@pytest.mark.parametrize("strategy", ["two"], indirect=True)
def test_a_copy_has_the_parts_of_one_replica(strategy: Divided) -> None:
    """No tensor is gathered for it, and objects that the program has dropped are not in it."""

    def use(width: int) -> None:
        with strategy.scope(), torch.device("meta"):
            model = nn.Linear(width, width, bias=False)
        with strategy.scope():
            rd.materialize(model)
            optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(7):
            strategy.local_results(strategy.run(step))

    use(64)
    use(32)
    point: Any = strategy._launch().copies
    states: list[StateOfParts] = [ray.get(each).handed.state for each in point.point().copies]
    assert [[each.image.array.nbytes for each in state.tensors.values()] for state in states] == [[32 * 16 * 4]] * 2
    assert [len(state.blueprints) for state in states] == [1, 1]
    parts = [each for state in states for _, held in [*state.states.values()][0] for each in held.values()]
    assert sorted(part.image.array.nbytes for part in parts) == [4] * 2 + [32 * 16 * 4] * 4


class DiesOnArrival(nn.Linear):
    """A layer whose process is killed while it takes over a copy of a state, once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(4, 4)
        self.folder = folder

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch does not annotate it
        if (self.folder / "first-3-1").exists() and torch.distributed.is_initialized():
            Fault("second", 0, 0).at("second", 0, self.folder)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["two"], indirect=True)
def test_a_loss_while_replicas_take_over_copies(strategy: Divided, tmp_path: Path) -> None:
    def train(folder: Path, *faults: Fault) -> list[torch.Tensor]:
        folder.mkdir()
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(4, 4), DiesOnArrival(folder))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(number: int) -> None:
            optimizer.zero_grad()
            model(torch.full((3, 4), float(number))).square().mean().backward()
            for fault in faults:
                fault.at("first", number, folder)
            optimizer.step()

        for number in range(7):
            strategy.run(step, args=(number,))
        return [each.detach().clone() for each in model.parameters()]

    expected = train(tmp_path / "undisturbed")
    found = train(tmp_path / "disturbed", Fault("first", 3, 1))
    assert (tmp_path / "disturbed" / "second-0-0").exists()
    assert [failure.ranks for failure in strategy.failures()] == [(0, 1)], "both in one recovery"
    assert all(map(torch.equal, expected, found))
