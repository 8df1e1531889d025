"""Errors of steps on real replicas, and the state of the program after them."""

from __future__ import annotations

import re
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torchmetrics
from torch import nn

import raydist as rd
from tests.odd_errors import Departure, Mute
from tests.strategies.replica_rows import rows

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def test_a_batch_of_more_replicas_loses_no_rows_in_silence(two: rd.MirroredStrategy) -> None:
    of_three = rd.PerReplica([torch.ones(1)] * 3)
    with pytest.raises(rd.InvalidArgumentError, match="each of the 2 replicas, got one with 3"):
        two.run(torch.sum, args=(of_three,))
    assert two.gather(two.run(lambda x: x, args=(rows(two, [[1.0], [2.0]]),)), 0).tolist() == [1.0, 2.0]


def test_an_error_on_one_replica_surfaces_and_the_strategy_goes_on(two: rd.MirroredStrategy) -> None:
    with two.scope():
        model = nn.Linear(1, 1)

    def step(x: torch.Tensor, fails_on: int) -> Any:
        ctx = rd.get_replica_context()
        if ctx.replica_id_in_sync_group == fails_on:
            raise KeyError("my own error")
        return ctx.all_reduce("SUM", model(x.float().view(-1, 1)).sum())

    x = rows(two, [[1.0], [2.0]])
    for fails_on in (0, 1):
        with pytest.raises(KeyError, match="my own error") as caught:
            two.local_results(two.run(step, args=(x, fails_on)))
        assert f"on replica {fails_on}" in "".join(caught.value.__notes__)
        values = two.run(step, args=(x, -1)).values
        assert values[0] == values[1]


def test_a_step_that_moves_the_model_is_told_so_and_the_model_stays(two: rd.MirroredStrategy) -> None:
    with two.scope():
        model = nn.Linear(1, 1, bias=False)

    def step(x: torch.Tensor) -> Any:
        return model.to(x.device)(x.float().view(-1, 1)).sum()

    with pytest.raises(rd.FailedPreconditionError, match=r"a step moves a Linear to meta. Leave out") as caught:
        two.local_results(two.run(lambda: model.to("meta").bias))
    assert "on replica" in "".join(caught.value.__notes__)
    found = two.run(step, args=(rows(two, [[2.0], [3.0]]),))
    assert [float(each) for each in two.local_results(found)] == pytest.approx(
        [2 * model.weight.item(), 3 * model.weight.item()]
    )


def test_a_model_that_the_program_moves_is_named_with_its_way_back(two: rd.MirroredStrategy) -> None:
    with two.scope():
        model = nn.Linear(1, 1)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta")
    said = r"has them \(cpu\); parameter 'weight' of module Linear was moved to meta\. Leave out \.to\(device\): each"
    with pytest.raises(rd.FailedPreconditionError, match=said):
        two.run(lambda: model.weight.sum())
    with two.scope():
        model.to_empty(device="cpu").load_state_dict(values)
    assert two.run(lambda: model.weight.item()).values == (values["weight"].item(),) * 2


def run_again() -> Any:
    return rd.get_strategy().run(lambda: 1)


def run_another() -> Any:
    return rd.OneDeviceStrategy("cpu").run(lambda: 1)


def enter_scope() -> bool:
    with rd.get_strategy().scope():
        return True


def wrap_model() -> bool:
    return nn.parallel.DistributedDataParallel(nn.Linear(1, 1)).training


@pytest.mark.parametrize(
    ("step", "kind", "message"),
    [
        (run_again, rd.FailedPreconditionError, "run is for the driver: .* in strategy.run. Call it around the step"),
        (run_another, rd.FailedPreconditionError, "by the driver, not inside of another run. Call the function itself"),
        (enter_scope, rd.FailedPreconditionError, "inside of strategy.run. Enter it around what creates the model"),
        (wrap_model, ValueError, "(?s)not been initialized.*rd.get_replica_context.*no DistributedDataParallel around"),
    ],
)
def test_what_a_step_must_not_call_says_what_to_call(
    two: rd.MirroredStrategy, step: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        two.local_results(two.run(step))
    notes = "\n".join(caught.value.__notes__)
    assert re.search(message, f"{caught.value}\n{notes}")
    assert re.search(r"In step \d+ on replica 0 \(cpu\)", notes)
    assert two.run(lambda: 1).values == (1, 1)


def test_parameters_that_one_replica_puts_into_other_places_are_named(two: rd.MirroredStrategy) -> None:
    with two.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def step(swaps: bool) -> bool:
        first, second = model
        if swaps and rd.get_replica_context().replica_id_in_sync_group == 1:
            first.weight, second.weight = second.weight, first.weight
        return True

    checked = rd.RunOptions(param_sync_every=1)
    assert two.run(step, args=(False,), options=checked).values == (True, True)
    said = r"replica 0: \S*0\.weight .*; replica 1: \S*1\.weight .*Look for .* that only some put into other places"
    with pytest.raises(rd.CollectiveMismatchError, match=said):
        two.local_results(two.run(step, args=(True,), options=checked))
    assert two.run(step, args=(False,), options=checked).values == (True, True)  # all have those of the first again


@pytest.mark.parametrize(("kind", "args"), [(Departure, ("left",)), (Mute, (1, 2))])
def test_any_error_of_a_step_keeps_its_type_and_names_replica_and_step(
    two: rd.MirroredStrategy, kind: type[BaseException], args: tuple[Any, ...]
) -> None:
    def step(fails: bool) -> int:
        if fails and rd.get_replica_context().replica_id_in_sync_group == 1:
            raise kind(*args)
        return 1

    with pytest.raises(kind) as caught:
        two.local_results(two.run(step, args=(True,)))
    assert caught.value.args == args[:1]
    host = re.escape(f"of node {ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:8]}).")
    assert re.search(rf"In step \d+ on replica 1 \(cpu\) {host}", "".join(caught.value.__notes__))
    assert two.run(step, args=(False,)).values == (1, 1)


@pytest.mark.parametrize("size", [1, 300_000])  # of results that come by the channel, and by Ray
@pytest.mark.parametrize("odd", ["all", "one"])
def test_another_nest_than_before_is_told_where_it_is_passed_on_unread(
    two: rd.MirroredStrategy, size: int, odd: str
) -> None:
    def step(keys: torch.Tensor) -> Any:
        if rd.get_replica_context().replica_id_in_sync_group == 0 and odd == "one":
            keys = torch.tensor([97, 98])
        return {chr(key): torch.full((size,), float(key)) for key in keys.tolist()}

    assert two.local_results(two.run(step, args=(torch.tensor([97, 98]),))["b"])[1][0] == ord("b")
    changed = two.run(step, args=(torch.tensor([98, 99]),))
    with pytest.raises(rd.InvalidArgumentError, match=r"(?s)'a'.*'b'.*'c'.*Return the same keys"):
        two.local_results(two.run(torch.sum, args=(changed["a"],)))


@pytest.mark.parametrize("runs_before", [False, True])
def test_a_step_method_that_replicas_would_not_run_is_told(two: rd.MirroredStrategy, runs_before: bool) -> None:
    with two.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.step()

    if runs_before:
        two.run(step)
    usual: Any = optimizer
    usual.step = lambda: None
    with pytest.raises(
        rd.FailedPreconditionError, match="must use the `step` of its class.*Use register_step_pre_hook"
    ):
        two.run(step)
    del usual.step
    two.run(step)


def test_what_cannot_be_pickled_is_named(two: rd.MirroredStrategy) -> None:
    lock = threading.Lock()

    def step() -> bool:
        return lock.locked()

    with pytest.raises((TypeError, rd.FailedPreconditionError), match="lock"):
        two.run(step)
    with pytest.raises(rd.SpecError, match="got lock"):
        two.run(lambda: threading.Lock())


def test_an_error_is_told_once(ray_cluster: None) -> None:
    strategy = rd.MirroredStrategy(1, resources_per_replica={"CPU": 0.01})
    with strategy, pytest.raises(ZeroDivisionError):
        strategy.local_results(strategy.run(lambda: 1 / 0))
    assert strategy._closed


def test_what_was_made_outside_of_the_scope_is_named(two: rd.MirroredStrategy) -> None:
    outside = nn.Linear(1, 1)
    foreign = torch.optim.SGD(outside.parameters(), lr=0.1)
    with pytest.raises(
        rd.FailedPreconditionError, match=r"under the scope of MirroredStrategy-.*parameter .* of module Linear"
    ):
        two.run(lambda: outside.weight.sum())
    with pytest.raises(rd.FailedPreconditionError, match=r"under the scope of MirroredStrategy-.*of optimizer SGD"):
        two.run(lambda: foreign.step())


def test_a_variable_of_another_strategy_is_named(two: rd.MirroredStrategy) -> None:
    with two.scope():
        model = nn.Linear(1, 1)

    def step() -> float:
        return float(model.weight.sum())

    two.run(step)
    other = rd.MirroredStrategy(1, resources_per_replica={"CPU": 0.01})
    message = f"belongs to another one than {other._name}"
    with other, pytest.raises(rd.FailedPreconditionError, match=message):
        other.run(step)


def test_sigterm_ends_replicas_at_once(two: rd.MirroredStrategy) -> None:
    assert two.run(lambda: signal.getsignal(signal.SIGTERM) == signal.SIG_DFL).values == (True, True)


@pytest.mark.parametrize(
    "meet",
    [
        lambda strategy, results, model: [strategy.local_results(result) for result in results],
        lambda strategy, results, model: strategy.local_results(results[-1]),
        lambda strategy, results, model: model.weight.sum().item(),
        lambda strategy, results, model: [strategy.run(lambda: 1).values for _ in range(3)],
    ],
    ids=["all", "last", "variable", "next"],
)
def test_an_error_that_was_caught_is_not_raised_again(two: rd.MirroredStrategy, meet: Callable[..., Any]) -> None:
    with two.scope():
        model = nn.Linear(1, 1)

    def step(number: int) -> Any:
        if number == 0:
            raise KeyError("mine")
        return model(torch.ones(1, 1)).sum()

    for number in (-1, -2):  # from then on no number is waited for
        two.local_results(two.run(step, args=(number,)))
    results = [two.run(step, args=(number,)) for number in range(4)]
    with pytest.raises((KeyError, rd.CancelledError)):
        meet(two, results, model)
    group = two._launched
    assert group is not None
    group.wait_to_close()  # what closing waits for
    assert two.run(lambda: 1).values == (1, 1)


@pytest.mark.parametrize("failing", [0, 1])
def test_statistics_and_metrics_after_a_failed_step(two: rd.MirroredStrategy, failing: int) -> None:
    with two.scope():
        norm = nn.BatchNorm1d(1, momentum=0.5, affine=False)
        metrics: Any = torchmetrics.MetricCollection(
            [torchmetrics.SumMetric(), torchmetrics.MeanMetric(), torchmetrics.MaxMetric(), torchmetrics.CatMetric()]
        )

    def step(batch: torch.Tensor, fails: bool) -> torch.Tensor:
        if fails and rd.get_replica_context().replica_id_in_sync_group == failing:
            raise ZeroDivisionError("on purpose")
        if not fails:
            norm(batch)
            metrics.update(batch.flatten())
        return batch.sum()

    def seen() -> tuple[float, dict[str, Any]]:
        assert norm.running_mean is not None
        found = {name: value.sort().values.tolist() for name, value in metrics.compute().items()}
        return norm.running_mean.item(), found

    rows = np.arange(4.0, dtype=np.float32).reshape(4, 1)
    (batch,) = two.distribute_dataset(rd.Dataset.from_tensor_slices(rows).batch(4))
    two.run(step, args=(batch, False))
    expected: dict[str, Any] = {
        "SumMetric": 6.0,
        "MeanMetric": 1.5,
        "MaxMetric": 3.0,
        "CatMetric": [0.0, 1.0, 2.0, 3.0],
    }
    assert seen() == (0.75, expected)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            two.local_results(two.run(step, args=(batch, True)))
        assert seen() == (0.75, expected)
    two.run(step, args=(batch, False))
    twice = {"SumMetric": 12.0, "MeanMetric": 1.5, "MaxMetric": 3.0, "CatMetric": sorted(expected["CatMetric"] * 2)}
    assert seen() == (0.75 / 2 + 0.75, twice)


def test_rows_that_a_replica_stood_in_for_are_not_counted_by_a_failed_step(two: rd.MirroredStrategy) -> None:
    with two.scope():
        total = torchmetrics.SumMetric()
        norm = nn.BatchNorm1d(1, momentum=0.5, affine=False)

    def step(batch: torch.Tensor, fails: bool) -> torch.Tensor:
        if fails and rd.get_replica_context().num_rows:
            raise ZeroDivisionError("on purpose")
        total.update(batch)
        norm(batch)
        return batch.sum()

    whole, rest = two.distribute_dataset(
        rd.Dataset.from_tensor_slices(np.arange(5.0, dtype=np.float32).reshape(5, 1)).batch(4)
    )
    two.run(step, args=(whole, False))
    assert norm.running_mean is not None
    assert (total.compute().item(), norm.running_mean.item()) == (6.0, 0.75)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        two.local_results(two.run(step, args=(rest, True)))
    assert (total.compute().item(), norm.running_mean.item()) == (6.0, 0.75)


def test_a_step_that_appends_to_a_captured_list_is_warned_of_once(two: rd.MirroredStrategy) -> None:
    losses: list[float] = []

    def step(value: float) -> torch.Tensor:
        losses.append(value)
        return torch.tensor(value)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            two.local_results(two.run(step, args=(1.0,)))
    assert losses == []
    (warning,) = caught
    assert "'step'" in str(warning.message)
    assert "changed losses: the program's own stays as it is" in str(warning.message)


def test_a_method_that_counts_is_warned_of_when_its_results_are_not_read(two: rd.MirroredStrategy) -> None:
    class Trainer:
        count = 0

        def step(self) -> None:
            self.count += 1

    trainer = Trainer()
    two.run(trainer.step)
    with pytest.warns(UserWarning, match=r"'step' .* changed self.count"):
        two.local_results(two.run(lambda: 1))
    assert trainer.count == 0
