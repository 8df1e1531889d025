"""Errors of steps on real replicas, and the state of the program after them."""

from __future__ import annotations

import re
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


def run_another() -> Any:
    return rd.OneDeviceStrategy("cpu").run(lambda: 1)


def wrap_model() -> bool:
    return nn.parallel.DistributedDataParallel(nn.Linear(1, 1)).training


BAD_STEPS: tuple[tuple[Callable[[], Any], type[Exception], str], ...] = (
    (run_another, rd.FailedPreconditionError, "by the driver, not inside of another run. Call the function itself"),
    (wrap_model, ValueError, "(?s)not been initialized.*rd.get_replica_context.*no DistributedDataParallel around"),
)


def test_what_a_step_must_not_call_says_what_to_call(two: rd.MirroredStrategy) -> None:
    for step, kind, message in BAD_STEPS:
        with pytest.raises(kind) as caught:
            two.local_results(two.run(step))
        notes = "\n".join(caught.value.__notes__)
        assert re.search(message, f"{caught.value}\n{notes}")
        assert re.search(r"In step \d+ on replica 0 \(cpu\)", notes)
        assert two.run(lambda: 1).values == (1, 1)


def test_any_error_of_a_step_keeps_its_type_and_names_replica_and_step(two: rd.MirroredStrategy) -> None:
    kinds: tuple[tuple[type[BaseException], tuple[Any, ...]], ...] = ((Departure, ("left",)), (Mute, (1, 2)))
    host = re.escape(f"of node {ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:8]}).")
    for kind, args in kinds:

        def step(kind: type[BaseException] = kind, args: tuple[Any, ...] = args) -> int:
            if rd.get_replica_context().replica_id_in_sync_group == 1:
                raise kind(*args)
            return 1

        with pytest.raises(kind) as caught:
            two.local_results(two.run(step))
        assert caught.value.args == args[:1]
        assert re.search(rf"In step \d+ on replica 1 \(cpu\) {host}", "".join(caught.value.__notes__))
        assert two.run(lambda: 1).values == (1, 1)


def test_another_nest_than_before_is_told_where_it_is_passed_on_unread(two: rd.MirroredStrategy) -> None:
    def step(keys: torch.Tensor, size: int) -> Any:
        if rd.get_replica_context().replica_id_in_sync_group == 0 and size == 1:
            keys = torch.tensor([97, 98])  # only one replica returns others
        return {chr(key): torch.full((size,), float(key)) for key in keys.tolist()}

    for size in (1, 300_000):  # small results come with the answer, large ones by the object store
        assert two.local_results(two.run(step, args=(torch.tensor([97, 98]), size))["b"])[1][0] == ord("b")
        changed = two.run(step, args=(torch.tensor([98, 99]), size))
        with pytest.raises(rd.InvalidArgumentError, match=r"(?s)'a'.*'b'.*'c'.*Return the same keys"):
            two.local_results(two.run(torch.sum, args=(changed["a"],)))


def test_a_step_method_that_replicas_would_not_run_is_told(two: rd.MirroredStrategy) -> None:
    with two.scope():
        model = nn.Linear(1, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.step()

    for _ in range(2):  # before the first step, and after it
        optimizer.step = lambda: None
        with pytest.raises(
            rd.FailedPreconditionError, match="must use the `step` of its class.*Use register_step_pre_hook"
        ):
            two.run(step)
        del optimizer.step
        two.run(step)


MEETINGS: tuple[Callable[..., Any], ...] = (
    lambda strategy, results, model: [strategy.local_results(result) for result in results],
    lambda strategy, results, model: strategy.local_results(results[-1]),
    lambda strategy, results, model: model.weight.sum().item(),
    lambda strategy, results, model: [strategy.run(lambda: 1).values for _ in range(3)],
)


def test_an_error_that_was_caught_is_not_raised_again(two: rd.MirroredStrategy) -> None:
    with two.scope():
        model = nn.Linear(1, 1)

    def step(number: int) -> Any:
        if number == 0:
            raise KeyError("mine")
        return model(torch.ones(1, 1)).sum()

    for number in (-1, -2):  # from then on no number is waited for
        two.local_results(two.run(step, args=(number,)))
    for meet in MEETINGS:
        results = [two.run(step, args=(number,)) for number in range(4)]
        with pytest.raises((KeyError, rd.CancelledError)):
            meet(two, results, model)
        group = two._launched
        assert group is not None
        group.wait_to_close()  # what closing waits for
        assert two.run(lambda: 1).values == (1, 1)


def test_statistics_and_metrics_after_a_failed_step(two: rd.MirroredStrategy) -> None:
    with two.scope():
        norm = nn.BatchNorm1d(1, momentum=0.5, affine=False)
        metrics: Any = torchmetrics.MetricCollection(
            [torchmetrics.SumMetric(), torchmetrics.MeanMetric(), torchmetrics.MaxMetric(), torchmetrics.CatMetric()]
        )

    def step(batch: torch.Tensor, failing: tuple[int, ...] = ()) -> torch.Tensor:
        context = rd.get_replica_context()
        if context.replica_id_in_sync_group in failing and context.num_rows:
            raise ZeroDivisionError("on purpose")
        if not failing or not context.num_rows:
            norm(batch)
            metrics.update(batch.flatten())
        return batch.sum()

    def seen() -> tuple[float, dict[str, Any]]:
        assert norm.running_mean is not None
        found = {name: value.sort().values.tolist() for name, value in metrics.compute().items()}
        return norm.running_mean.item(), found

    rows = np.arange(5.0, dtype=np.float32).reshape(5, 1)
    batch, rest = two.distribute_dataset(rd.Dataset.from_tensor_slices(rows).batch(4))
    two.run(step, args=(batch,))
    values = [0.0, 1.0, 2.0, 3.0]
    expected = 0.75, {"SumMetric": 6.0, "MeanMetric": 1.5, "MaxMetric": 3.0, "CatMetric": values}
    assert seen() == expected
    # Of the last batch the second replica has no rows: it has counted those on which it runs when the first one fails.
    for given, failing in ((batch, (0,)), (batch, (1,)), (rest, (0,)), (batch, (0,))):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            two.local_results(two.run(step, args=(given, failing)))
        assert seen() == expected
    two.run(step, args=(batch,))
    twice = {"SumMetric": 12.0, "MeanMetric": 1.5, "MaxMetric": 3.0, "CatMetric": sorted(values * 2)}
    assert seen() == (0.75 / 2 + 0.75, twice)


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
