"""Functions of the current strategy: itself, its context, its step, average losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.core.errors import InvalidArgumentError
from raydist.options import RunOptions
from raydist.strategies.functions import compute_average_loss, get_replica_context, get_strategy
from raydist.strategies.one_device import OneDeviceStrategy
from tests.training.toys import compiled, regression, small_net


def test_outside_there_is_one_replica_on_the_cpu() -> None:
    assert isinstance(get_strategy(), OneDeviceStrategy)
    assert get_strategy().worker_devices == ("CPU:0",)
    assert get_replica_context().num_replicas_in_sync == 1


def test_a_scope_has_a_strategy_and_no_replica() -> None:
    strategy = OneDeviceStrategy()
    with strategy.scope():
        assert get_strategy() is strategy
        assert [get_replica_context()] == [None]


def test_a_run_has_both() -> None:
    strategy = OneDeviceStrategy()
    assert strategy.run(lambda: get_strategy() is strategy and get_replica_context().strategy is strategy)


def test_the_strategy_outside_of_every_scope_runs_whatever_it_is_given() -> None:
    layer = torch.nn.Linear(1, 1)
    assert get_strategy().run(lambda: layer(torch.ones(1, 1)).shape) == (1, 1)


def test_it_checks_no_gradients() -> None:
    with pytest.raises(InvalidArgumentError, match="needs a strategy whose scope has made the model"):
        get_strategy().run(lambda: None, options=RunOptions(on_nonfinite="raise"))


def own_loop(strategy: rd.Strategy, num_batches: int) -> tuple[list[int], int]:
    """What the global step is in each step of a loop that counts in its steps, and what it is afterwards."""
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


def test_a_loop_of_ones_own_counts_in_its_steps() -> None:
    assert own_loop(rd.OneDeviceStrategy("cpu"), 3) == ([0, 1, 2], 3)


def test_each_strategy_has_its_own() -> None:
    one, other = rd.OneDeviceStrategy("cpu"), rd.OneDeviceStrategy("cpu")
    own_loop(one, 2)
    assert own_loop(other, 1) == ([0], 1)
    with one.scope():
        assert int(rd.get_global_step()) == 2


def test_outside_of_scopes_there_is_one_for_the_process() -> None:
    before = int(rd.get_global_step())
    rd.get_global_step().add_(1)
    assert int(rd.get_global_step()) == before + 1


def test_fit_counts_global_batches_and_goes_on() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    with strategy.scope():
        model = compiled(small_net(), steps_per_execution=2)
        model.fit(regression(10, 4), epochs=2, validation_data=regression(10, 4), verbose=False)
        assert int(rd.get_global_step()) == 6
        model.fit(regression(10, 4), verbose=False)
        assert int(rd.get_global_step()) == 9


def test_a_step_that_asks_first_is_told_what_to_do() -> None:
    with pytest.raises(rd.FailedPreconditionError, match=r"Call rd.get_global_step\(\) under the scope"):
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


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"per_example_loss": torch.tensor(1.0)}, rd.InvalidArgumentError, "one loss per row"),
        ({"per_example_loss": torch.ones(2), "global_batch_size": 2.0}, rd.SpecError, "must be an int, got 2.0"),
        ({"per_example_loss": torch.ones(2), "global_batch_size": -1}, rd.InvalidArgumentError, "got -1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compute_average_loss(**arguments)


def test_it_belongs_into_a_step() -> None:
    with rd.OneDeviceStrategy().scope(), pytest.raises(rd.FailedPreconditionError, match="step function"):
        compute_average_loss(torch.ones(2))
