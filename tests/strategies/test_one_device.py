"""One device, and functions of the current strategy: its context, its global step, average losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd
from raydist.core.errors import InvalidArgumentError
from raydist.options import RunOptions
from raydist.strategies.functions import compute_average_loss, get_replica_context, get_strategy
from raydist.strategies.one_device import OneDeviceStrategy
from tests.forks import in_a_forked_child
from tests.training.toys import compiled, regression, small_net


@pytest.fixture
def strategy() -> Iterator[rd.Strategy]:
    with rd.OneDeviceStrategy("cpu") as made:
        yield made


def test_closed_it_hands_out_no_batches(strategy: rd.Strategy) -> None:
    data = strategy.distribute_dataset(rd.Dataset.range(6).batch(2))
    begun = iter(data)
    next(begun)
    strategy.close()
    for iterator in (begun, iter(data)):
        with pytest.raises(rd.FailedPreconditionError, match="is closed and can't read a distributed dataset"):
            next(iterator)


def test_devices_that_are_not_there_are_errors_when_the_strategy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("tpu", "cpu:x", "", None, 3):
        with pytest.raises(rd.InvalidArgumentError, match="A device must be named like"):
            rd.OneDeviceStrategy(device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rd.OneDeviceStrategy("GPU:1").worker_devices == ("GPU:1",)
    with pytest.raises(rd.InvalidArgumentError, match=r"GPU:2 was asked for, and torch sees 2 GPUs.*use \"CPU:0\""):
        rd.OneDeviceStrategy("cuda:2")


def test_rows_of_a_batch_are_known_by_any_of_its_leaves_as_long_as_it_lives() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    batches = list(
        strategy.distribute_dataset(rd.Dataset.from_tensor_slices({"x": np.arange(5), "y": np.arange(5)}).batch(3))
    )

    def num_rows(value: Any) -> int | None:
        context = rd.get_replica_context()
        assert context is not None
        return context.num_rows

    assert [strategy.run(num_rows, args=(batch["y"],)) for batch in batches] == [3, 2]
    assert strategy.run(num_rows, args=((7, batches[1]["x"]),)) == 2
    assert strategy.run(num_rows, args=(torch.arange(5),)) is None
    assert len(strategy._batches._rows) == 4
    del batches
    assert not strategy._batches._rows


def test_a_forked_child_is_told_as_under_every_strategy() -> None:
    strategy = rd.OneDeviceStrategy("cpu")

    def child() -> None:
        with pytest.raises(rd.FailedPreconditionError, match="this is its forked child"):
            strategy.run(len, args=([],))
        assert rd.OneDeviceStrategy("cpu").run(len, args=([],)) == 0

    assert in_a_forked_child(child) == 0
    assert strategy.run(len, args=([],)) == 0


def test_outside_of_every_scope_there_is_one_replica_on_the_cpu_that_runs_whatever_it_is_given() -> None:
    strategy = get_strategy()
    assert isinstance(strategy, OneDeviceStrategy)
    assert strategy.worker_devices == ("CPU:0",)
    assert get_replica_context().num_replicas_in_sync == 1
    layer = torch.nn.Linear(1, 1)
    assert strategy.run(lambda: layer(torch.ones(1, 1)).shape) == (1, 1)
    with pytest.raises(InvalidArgumentError, match="needs a strategy whose scope has made the model"):
        strategy.run(lambda: None, options=RunOptions(on_nonfinite="raise"))


def own_loop(strategy: rd.Strategy, num_batches: int) -> tuple[list[int], int]:
    """Return the global step in each step of a loop that counts in its steps, and its value afterwards."""
    with strategy.scope():
        counter = rd.get_global_step()
        assert rd.get_global_step() is counter

    def step(batch: torch.Tensor) -> Any:
        seen = rd.get_global_step().clone()
        rd.get_global_step().add_(1)
        return seen

    data = strategy.distribute_dataset(rd.Dataset.range(2 * num_batches).batch(2))
    results = [strategy.run(step, args=(batch,)) for batch in data]
    return [int(strategy.local_results(result)[0]) for result in results], int(counter)


def test_each_strategy_and_the_process_have_a_global_step_which_loops_of_ones_own_count() -> None:
    one, other = rd.OneDeviceStrategy("cpu"), rd.OneDeviceStrategy("cpu")
    outside = int(rd.get_global_step())
    assert own_loop(one, 3) == ([0, 1, 2], 3)
    assert own_loop(other, 1) == ([0], 1)
    with one.scope():
        assert int(rd.get_global_step()) == 3
    rd.get_global_step().add_(1)
    assert int(rd.get_global_step()) == outside + 1
    with pytest.raises(rd.FailedPreconditionError, match=r"Call rd.get_global_step\(\) in the scope"):
        rd.OneDeviceStrategy("cpu").run(rd.get_global_step)


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_replicas_count_alike(two: rd.MirroredStrategy) -> None:
    with two.scope():
        before = int(rd.get_global_step())
    seen, after = own_loop(two, 3)
    assert (seen, after) == ([before, before + 1, before + 2], before + 3)
    with two.scope():
        rd.get_global_step().fill_(100)
        model = compiled(small_net())
    model.fit(regression(5, 4), epochs=2, verbose=False)  # the second replica has no row of the last batch
    with two.scope():
        assert int(rd.get_global_step()) == 104


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_closures_of_all_workers_count(served: Callable[[int], rd.ParameterServerStrategy]) -> None:
    strategy = served(2)
    with strategy.scope():
        rd.get_global_step().fill_(101)
        model = compiled(small_net())
    model.fit(regression(40, 4), verbose=False)
    with strategy.scope():
        assert int(rd.get_global_step()) == 111


def test_the_denominator_is_global() -> None:
    losses = torch.tensor([1.0, 3.0])
    assert compute_average_loss(losses, global_batch_size=8).item() == 0.5
    assert compute_average_loss(losses).item() == 2.0
    assert compute_average_loss(losses, sample_weight=torch.tensor([0.0, 2.0])).item() == 3.0
    assert (
        compute_average_loss(torch.ones(2, 3), sample_weight=torch.tensor([1.0, 2.0]), global_batch_size=3).item() == 3
    )
    assert compute_average_loss(torch.zeros(0), global_batch_size=0).item() == 0.0


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_shares_of_replicas_add_up_to_the_mean_over_the_global_batch(two: rd.MirroredStrategy) -> None:
    def share(rows: torch.Tensor) -> torch.Tensor:
        return compute_average_loss(rows.float())

    batch = next(iter(two.distribute_dataset(rd.Dataset.range(5).batch(5))))
    assert float(sum(two.local_results(two.run(share, args=(batch,))))) == 2.0
    shares = two.local_results(two.run(share, args=(torch.tensor([1, 3]),)))
    assert [float(each) for each in shares] == [1.0, 1.0]


def test_average_losses_that_cannot_be() -> None:
    bad: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"per_example_loss": torch.tensor(1.0)}, rd.InvalidArgumentError, "one loss per row"),
        ({"per_example_loss": torch.ones(2), "global_batch_size": 2.0}, rd.SpecError, "must be an int, got 2.0"),
        ({"per_example_loss": torch.ones(2), "global_batch_size": -1}, rd.InvalidArgumentError, "got -1"),
    )
    for arguments, error, message in bad:
        with pytest.raises(error, match=message):
            compute_average_loss(**arguments)
    with rd.OneDeviceStrategy().scope(), pytest.raises(rd.FailedPreconditionError, match="step function"):
        compute_average_loss(torch.ones(2))
