"""`strategy.run` on real replicas: arguments, results, dispatch, gradients, random numbers."""

from __future__ import annotations

import time
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

import raydist as rd
from tests.strategies.replica_rows import rows

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def test_classes_of_the_program_come_back_as_they_are(two: rd.MirroredStrategy) -> None:
    Pair = namedtuple("Pair", "first second")  # no other process can import it: it travels by value

    @dataclass
    class Both:
        first: Any
        second: Any

    for kind in (Pair, Both):

        def of_that_kind(batch: Any, kind: type = kind) -> tuple[bool, Any, Any]:
            return isinstance(batch, kind), batch, kind(batch.first + 1, batch.second)

        numbers = torch.arange(8.0)
        dataset = rd.Dataset.from_tensor_slices(kind(numbers, numbers + 1)).batch(4)
        (batch, *_) = two.distribute_dataset(dataset)
        assert isinstance(batch, kind)
        known, same, made = two.run(of_that_kind, args=(batch,))
        assert two.local_results(known) == (True, True)
        assert (type(same), type(made)) == (kind, kind)
        assert two.gather(same.second, 0).tolist() == [1.0, 2.0, 3.0, 4.0]
        assert two.gather(made.first, 0).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_columns_of_a_batch_of_one_row_are_values_like_others(two: rd.MirroredStrategy) -> None:
    """To torch they are contiguous, with a stride of 2."""
    with two.scope():
        module, seen = nn.Module(), torchmetrics.CatMetric()
        module.register_buffer("column", torch.arange(10.0).reshape(5, 2)[:1, 1])

    def step(batch: torch.Tensor) -> tuple[torch.Tensor, Any]:
        column = batch[:, 1]
        seen.update(column)
        return rd.get_replica_context().all_gather(column, axis=0), module.get_buffer("column") + column

    dataset = rd.Dataset.from_tensor_slices(torch.arange(10.0).reshape(5, 2)).batch(2)
    gathered = [two.run(step, args=(batch,)) for batch in two.distribute_dataset(dataset)]
    assert [two.local_results(each)[0].tolist() for each, _ in gathered] == [[1.0, 3.0], [5.0, 7.0], [9.0]]
    assert two.gather(gathered[1][1], 0).tolist() == [6.0, 8.0]
    assert seen.compute().tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]


def test_of_two_batches_the_rows_of_both_count_once(two: rd.MirroredStrategy) -> None:
    """A replica that has rows of the first batch and none of the second is not handed others' rows of that."""
    datasets = [
        two.distribute_dataset(rd.Dataset.range(start, start + 3).batch(size)) for start, size in ((0, 2), (9, 1))
    ]
    for first, second in zip(*datasets, strict=False):
        sums = two.run(lambda one, other: (one.sum(), other.sum()), args=(first, second))
        found = [two.reduce("SUM", value, axis=None).item() for value in sums]
        assert found == [two.reduce("SUM", batch, axis=0).item() for batch in (first, second)]


def test_a_step_on_a_batch_of_no_rows_has_results(two: rd.MirroredStrategy) -> None:
    batches = two.distribute_dataset(rd.Dataset.range(8).batch(4).map(lambda rows: rows[rows > 5]))
    results = [two.run(torch.sum, args=(batch,)) for batch in batches]
    assert [two.reduce("SUM", result, axis=None).item() for result in results] == [0, 13]


def test_dispatch_does_not_wait(two: rd.MirroredStrategy) -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)
        return x

    x = rows(two, [[1.0], [2.0]])
    two.run(slow, args=(x,))  # the first call waits, to learn what nest comes back
    start = time.monotonic()
    results = [two.run(slow, args=(x,)) for _ in range(3)]
    dispatched = time.monotonic() - start
    values = [two.reduce("SUM", result, axis=0).item() for result in results]
    assert dispatched < 0.6 < time.monotonic() - start
    assert values == [3.0, 3.0, 3.0]


def test_gradients_travel_through_a_group_of_ray(two: rd.MirroredStrategy) -> None:
    def groups(name: str) -> tuple[bool, str]:
        from ray.util import collective

        tensor = torch.ones(2)
        collective.allreduce(tensor, name)
        return bool((tensor == 2).all()), collective.get_group_handle(name).backend()

    doubled, backend = two.run(groups, args=(f"{two._name}-gradients",))
    assert doubled.values == (True, True)
    assert backend.values == ("RAYDIST", "RAYDIST")


def test_a_parameter_made_in_a_step_would_not_be_mirrored(two: rd.MirroredStrategy) -> None:
    with two.scope():
        model = nn.Linear(1, 1)

    def step() -> None:
        model.extra = nn.Parameter(torch.zeros(1))

    two.run(step)
    with pytest.raises(rd.FailedPreconditionError, match="extra"):
        model.weight.tolist()


def test_the_older_spellings_work(two: rd.MirroredStrategy) -> None:
    dataset = two.experimental_make_numpy_dataset(np.arange(4)).batch(2)
    (first, _) = two.experimental_distribute_dataset(dataset)
    assert two.experimental_local_results(two.experimental_run_v2(lambda x: x.sum(), args=(first,))) == (0, 1)
