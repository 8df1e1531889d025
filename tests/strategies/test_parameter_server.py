"""Asynchronous training with workers and servers in actors; what needs none is tested in `tests/coordinator`."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.testing.strategy_contract import check_closing
from tests.conftest import live_actors
from tests.shared_strategies import few_workers

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def any_value(value: Any) -> Any:
    """Hide a value of a wrong type from the type checker."""
    return value


@pytest.fixture
def strategy(served: Callable[[int], rd.ParameterServerStrategy]) -> rd.ParameterServerStrategy:
    return served(2)


@pytest.fixture
def coordinator(strategy: rd.ParameterServerStrategy) -> rd.ClusterCoordinator:
    return rd.ClusterCoordinator(strategy)


def test_batches_train_a_model_and_the_driver_reads_what_came_of_it(strategy: rd.ParameterServerStrategy) -> None:
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
    x = torch.randn(64, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    dataset = strategy.distribute_dataset(rd.Dataset.from_tensor_slices((x, y)).batch(16))
    before = strategy.stats()
    losses = []
    for _ in range(15):
        for batch in dataset:
            losses.append(strategy.run(step, args=(batch,)))
            schedule.step()
    first, last = (strategy.reduce("MEAN", value)["loss"].item() for value in (losses[0], losses[-1]))
    assert last < first / 10
    assert len(losses) == 60
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert torch.allclose(model.weight, torch.tensor([[1.0, -2.0, 0.5]]), atol=0.3)
    stats = strategy.stats()
    assert stats.steps - before.steps == 60
    assert stats.servers[0].pushes - before.servers[0].pushes == 60
    assert sum(stats.servers[0].staleness.values()) - sum(before.servers[0].staleness.values()) == 60


def test_fit_counts_every_batch_once_and_its_scheduler_follows_them(strategy: rd.ParameterServerStrategy) -> None:
    x = torch.randn(70, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    with strategy.scope():
        torch.manual_seed(0)
        model = rd.Model(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
        with pytest.raises(rd.InvalidArgumentError, match=r"accumulate_steps must be 1 where .* Got 2\."):
            model.compile(optimizer, "mse", accumulate_steps=2)
        model.compile(optimizer, "mse", scheduler=schedule)
    dataset = rd.Dataset.from_tensor_slices((x, y)).batch(16)
    history = model.fit(dataset, epochs=5, validation_data=dataset, verbose=False).history
    assert history["loss"][-1] < history["loss"][0] / 10
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)
    predicted = model.predict(rd.Dataset.from_tensor_slices(x).batch(16), verbose=False)
    loss = nn.functional.mse_loss(predicted, y).item()
    assert history["val_loss"][-1] == pytest.approx(loss, rel=1e-4)
    assert model.evaluate(dataset, verbose=False)["loss"] == pytest.approx(loss, rel=1e-4)


def test_a_table_larger_than_the_machine_is_trained_by_rows(strategy: rd.ParameterServerStrategy) -> None:
    with strategy.scope():
        table = rd.ShardedEmbedding(10**10, 16, "mean", initializer="zeros")
        optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)

    def step(bags: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (table(bags) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    bags = torch.randint(0, 10**10, (32, 4), generator=torch.Generator().manual_seed(0))
    losses = [strategy.run(step, args=(bags,)) for _ in range(20)]
    assert losses[-1].get() < 0.6 * losses[0].get()
    states = table.export_rows()
    assert sum(len(state["rows"]) for state in states) == len(torch.unique(bags))
    with torch.no_grad():
        assert (table(bags) > 0.1).all()


def test_what_is_scheduled_comes_back_in_nests(coordinator: rd.ClusterCoordinator) -> None:
    values = [coordinator.schedule(lambda n: (n, {"twice": torch.tensor(2 * n)}), args=(n,)) for n in range(30)]
    fetched = coordinator.fetch({"all": values})
    assert [number for number, _ in fetched["all"]] == list(range(30))
    assert values[3][1]["twice"].get().item() == 6
    number, rest = values[4]
    assert (number, rest["twice"].item()) == (4, 8)
    coordinator.join()
    assert coordinator.done()
    assert values[0].done


def fail() -> None:
    raise KeyError("first")


def test_errors_of_coordinators(coordinator: rd.ClusterCoordinator) -> None:
    strategy: Any = coordinator.strategy
    assert rd.ClusterCoordinator(strategy) is coordinator
    with pytest.raises(rd.InvalidArgumentError, match=r"needs an rd\.ParameterServerStrategy, got OneDeviceStrategy"):
        rd.ClusterCoordinator(any_value(rd.OneDeviceStrategy("cpu")))
    remote = ({"nested": [coordinator.schedule(lambda: 1)]},)
    for fn, args, message in (
        (3, (), r"schedule needs a function, got 3"),
        (len, 3, r"args must be a tuple"),
        (print, remote, r"got a RemoteValue, which may not be computed yet\. Fetch it first"),
    ):
        with pytest.raises(rd.InvalidArgumentError, match=message):
            coordinator.schedule(any_value(fn), any_value(args))
    coordinator.join()
    coordinator.schedule(fail)
    with pytest.raises(KeyError, match="first"):
        coordinator.join()
    value = coordinator.schedule(time.sleep, args=(0.5,))
    with pytest.raises(rd.DeadlineExceededError, match=r"0\.2 s \(timeout\).*worker \d of parameter-server.*closure"):
        coordinator.join(timeout=0.2)
    coordinator.join(timeout=20)
    assert value.get() is None


def drawn(coordinator: rd.ClusterCoordinator, iterator: Any, kill_at: int = -1) -> list[tuple[int, list[int]]]:
    """Return the batches that closures draw until an iterator ends, each with the process that drew it."""

    def draw(batches: Any) -> tuple[int, list[int]]:
        return os.getpid(), next(batches).tolist()

    values, ended = [], False
    while not ended:
        try:
            values.append(coordinator.schedule(draw, args=(iterator,)))
            pid, _ = coordinator.fetch(values[-1])
            if len(values) == kill_at:
                os.kill(pid, signal.SIGKILL)
        except rd.OutOfRangeError:
            ended = True
    return [value.get() for value in values if value.done and not value._closure.error]


def test_every_worker_has_the_whole_dataset(coordinator: rd.ClusterCoordinator) -> None:
    dataset = coordinator.create_per_worker_dataset(rd.Dataset.range(6).batch(2))
    found = drawn(coordinator, iter(dataset))
    by_worker: dict[int, list[list[int]]] = {}
    for pid, batch in found:
        by_worker.setdefault(pid, []).append(batch)
    whole = [[0, 1], [2, 3], [4, 5]]
    assert all(batches == whole[: len(batches)] for batches in by_worker.values())
    assert whole in by_worker.values()
    with pytest.raises(rd.FailedPreconditionError, match=r"Give it to coordinator\.schedule"):
        next(iter(dataset))


def test_static_parts_are_each_workers_own(coordinator: rd.ClusterCoordinator) -> None:
    def make(context: rd.InputContext) -> rd.Dataset:
        return rd.Dataset.range(8).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)

    for given in (make, rd.Dataset.range(16).batch(2)):
        found = drawn(coordinator, iter(coordinator.create_per_worker_dataset(given, sharding="static")))
        numbers = [number for _, batch in found for number in batch]
        assert len(numbers) == len(set(numbers))
    with pytest.raises(rd.InvalidArgumentError, match="sharding must be None"):
        coordinator.create_per_worker_dataset(make, sharding=any_value("odd"))
    with pytest.raises(rd.SpecError, match="or a function that returns one, got int"):
        coordinator.create_per_worker_dataset(any_value(3))


@pytest.mark.usefixtures("replaced")
def test_dynamic_splits_are_given_to_whoever_asks_each_batch_once(coordinator: rd.ClusterCoordinator) -> None:
    dataset = coordinator.create_per_worker_dataset(rd.Dataset.range(60).batch(2), sharding="dynamic")
    for kill_at in (10, -1):
        found = drawn(coordinator, iter(dataset), kill_at)
        assert sorted(number for _, batch in found for number in batch) == list(range(60))


def test_each_worker_makes_its_own_values(coordinator: rd.ClusterCoordinator) -> None:
    values = coordinator.create_per_worker_values(lambda context: (context.input_pipeline_id, os.getpid()))
    seen = coordinator.fetch([coordinator.schedule(lambda v: (*v, os.getpid()), args=(values,)) for _ in range(20)])
    assert all(made_in == used_in for _, made_in, used_in in seen)
    assert {worker for worker, _, _ in seen} <= {0, 1}


@pytest.fixture
def replaced(strategy: rd.ParameterServerStrategy, shared_actors: set[str]) -> Iterator[None]:
    """For tests that kill workers: those that take their place are the strategy's from then on."""
    assert strategy._cluster.launched is not None
    roster = strategy._cluster.launched.coordinator._pool
    before = [roster.generation_of(worker) for worker in range(2)]
    yield
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        if [roster.generation_of(worker) for worker in range(2)] != before and len(roster.ready()) == 2:
            break
        time.sleep(0.05)
    shared_actors.update(live_actors())


@pytest.mark.usefixtures("replaced")
def test_what_a_worker_that_is_killed_had_to_do_is_done_once(
    strategy: rd.ParameterServerStrategy, coordinator: rd.ClusterCoordinator
) -> None:
    """Closures that each add their number to a variable."""
    with strategy.scope():
        weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=1.0)

    def step(amount: float) -> float:
        weight.grad = torch.full_like(weight, -amount)
        optimizer.step()
        return amount

    values = []
    for number in range(60):
        values.append(coordinator.schedule(step, args=(float(number),)))
        if number == 20:
            os.kill(coordinator.schedule(os.getpid).get(), signal.SIGKILL)
    assert coordinator.fetch(values) == [float(number) for number in range(60)]
    assert weight[0].item() == sum(range(60))


def test_what_cannot_be_asked_for() -> None:
    for message, asked in {
        r"num_workers must be >= 1.*at least one worker": {"num_workers": 0},
        r"num_ps must be >= 1.*at least one parameter server": {"num_ps": 0},
        r"variable_partitioner must be a function": {"variable_partitioner": any_value(3)},
        r"consistency must be": {"consistency": any_value("eventual")},
    }.items():
        with pytest.raises(rd.InvalidArgumentError, match=message):
            rd.ParameterServerStrategy(**asked)


def server_pids() -> set[int]:
    from ray._private.state import state

    actors = state.actor_table(None).values()
    return {each["Pid"] for each in actors if each["ActorClassName"] == "ServerHost" and each["State"] == "ALIVE"}


def momentum_step() -> tuple[nn.Linear, torch.optim.Optimizer, Callable[[], None]]:
    torch.manual_seed(0)
    layer = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        layer(torch.ones(3, 2, dtype=torch.float64)).square().mean().backward()
        optimizer.step()

    return layer, optimizer, step


@pytest.mark.long
def test_a_killed_server_is_an_error_soon_and_training_begins_again_from_what_was_saved(
    ray_cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Momentum included: ten steps, five of them after the servers' death, are ten steps of a bare loop."""
    others = server_pids()
    made = few_workers(1)
    with made.scope():
        layer, optimizer, step = momentum_step()
    for _ in range(5):
        made.run(step).get()
    saved = copy.deepcopy((dict(layer.state_dict()), optimizer.state_dict()))
    (pid,) = server_pids() - others
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(rd.UnavailableError, match=r"parameter server 0(?s:.)*restore from your last checkpoint"):
        made.run(step).get()
    assert time.monotonic() - began < 10
    with contextlib.suppress(rd.RaydistError), caplog.at_level(logging.WARNING, "raydist"):
        made.close()
    assert "keep values of before: parameter servers or all workers are gone. Load your last" in caplog.text
    assert layer.weight.shape == optimizer.param_groups[0]["params"][0].shape
    with few_workers(1) as made:
        with made.scope():
            layer, optimizer, step = momentum_step()
        layer.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for _ in range(5):
            made.run(step).get()
        trained = copy.deepcopy((dict(layer.state_dict()), optimizer.state_dict()))
    layer, optimizer, step = momentum_step()
    for _ in range(10):
        step()
    torch.testing.assert_close(trained[0], dict(layer.state_dict()), rtol=1e-9, atol=0)
    torch.testing.assert_close(trained[1]["state"], optimizer.state_dict()["state"], rtol=1e-9, atol=0)


def test_closing_ends_scheduling_and_leaves_plain_variables_without_rows_of_tables(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = few_workers(1)
    new = iter((made, few_workers(1)))  # the second one is closed before it starts anything
    coordinator = rd.ClusterCoordinator(made)
    with made.scope():
        layer, _, step = momentum_step()
        table = rd.ShardedEmbedding(100, 4)
    made.run(lambda: table(torch.tensor([1])).sum()).get()
    coordinator.schedule(step)
    drain, refused = made._drain, []

    def drain_beside_others() -> None:
        """A thread that goes on scheduling would keep it open for ever."""
        with pytest.raises(rd.FailedPreconditionError, match="is being closed. Let threads that schedule end"):
            made.run(step)
        refused.append(True)
        drain()

    monkeypatch.setattr(made, "_drain", drain_beside_others)
    check_closing(lambda: next(new))
    assert refused
    after_one = layer.weight.detach().clone()
    layer, _, own_step = momentum_step()
    own_step()
    assert torch.allclose(after_one, layer.weight, rtol=1e-9)
    for use in (lambda: coordinator.schedule(step), coordinator.join):
        with pytest.raises(rd.FailedPreconditionError, match="is closed"):
            use()
    reads: list[Callable[[], Any]] = [
        lambda: table(torch.tensor([1])),
        table.export_rows,
        lambda: copy.deepcopy(table)(torch.tensor([1])),
    ]
    for read in [*reads, *reads]:
        with pytest.raises(rd.FailedPreconditionError, match=r"rows .* closed\. Save an rd\.Checkpoint.*export_rows"):
            read()


def test_a_dropped_strategy_leaves_nothing(ray_cluster: None) -> None:
    made = few_workers(1)
    coordinator = rd.ClusterCoordinator(made)
    iterator = iter(coordinator.create_per_worker_dataset(rd.Dataset.range(4).batch(2), sharding="dynamic"))
    assert coordinator.schedule(lambda batches: next(batches).tolist(), args=(iterator,)).get() == [0, 1]
    del made, coordinator, iterator  # what is left behind, the fixture of all tests finds
