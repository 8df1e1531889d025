"""Loops in real replicas, and replicas without rows."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raydist as rd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def test_loops_inside_the_replicas(two: rd.MirroredStrategy) -> None:
    def loop(iterator: Any) -> tuple[list[Any], list[Any], torch.Tensor]:
        seen, counts = [], []
        total = torch.zeros((), dtype=torch.int64)
        for batch in iterator:
            seen.append(batch.tolist())
            counts.append(rd.get_replica_context().num_rows)
            if counts[-1]:
                total = total + batch.sum()
        return [seen], [counts], total

    for num_rows, last in ((10, [9]), (9, None)):  # of the latter the second replica has no row at the end
        batches = two.distribute_dataset(rd.Dataset.range(num_rows).batch(4))
        seen, counts, total = two.run(loop, args=(iter(batches),))
        assert [each[0][:2] for each in seen.values] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
        assert [each[0] for each in counts.values] == [[2, 2, 1], [2, 2, 1 if last else 0]]
        assert [int(each) for each in total.values] == [0 + 1 + 4 + 5 + 8, 2 + 3 + 6 + 7 + sum(last or ())]


def test_the_mean_of_a_loss_is_the_global_batchs(mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    strategy = mirrored(3)
    for num_rows, pads in itertools.product((50, 4, 1), (True, False)):
        x = np.random.default_rng(0).normal(size=num_rows)
        (batch,) = strategy.distribute_dataset(rd.Dataset.from_tensor_slices(x).batch(num_rows))
        options = rd.RunOptions(empty_batch="pad" if pads else "zero_rows")
        loss = strategy.run(lambda rows: {"mean": rows.mean(), "size": len(rows)}, args=(batch,), options=options)
        assert strategy.reduce("MEAN", loss)["mean"].item() == pytest.approx(x.mean(), rel=1e-12)
        assert strategy.reduce("SUM", loss)["size"].item() == num_rows


def test_the_mean_of_what_a_loop_gives_weighs_all_that_it_drew(mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    strategy = mirrored(3)

    def loop(iterator: Any) -> torch.Tensor:
        context = rd.get_replica_context()
        return torch.cat([rows for rows in iterator if context.num_rows]).mean()

    data = rd.Dataset.range(17).batch(5).map(lambda rows: rows * 1.0)  # 2 + 2 + 1 three times, then 1 + 1 + 0
    mean = strategy.reduce("MEAN", strategy.run(loop, args=(iter(strategy.distribute_dataset(data)),)))
    assert mean.item() == pytest.approx(8.0)
    equal = strategy.run(lambda: rd.get_replica_context().replica_id_in_sync_group)
    assert strategy.reduce("MEAN", equal).item() == 1.0


def test_a_replica_without_rows_counts_nothing(mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        model = nn.BatchNorm1d(1, momentum=1.0)
        weight = nn.Parameter(torch.ones(1))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, int | None, int]:
        y = model(x.view(-1, 1))
        weight.grad = None
        (weight * y + x.view(-1, 1)).mean().backward()
        ctx = rd.get_replica_context()
        return x, ctx.num_rows, len(x)

    data = rd.Dataset.from_tensor_slices(np.array([1.0, 3.0, 5.0, 9.0], dtype=np.float32)).batch(4)
    (batch,) = strategy.distribute_dataset(data)
    assert [value.tolist() for value in strategy.local_results(batch)] == [[1.0, 3.0], [5.0, 9.0], []]
    x, num_rows, _ = strategy.run(step, args=(batch,))
    assert strategy.gather(x).tolist() == [1.0, 3.0, 5.0, 9.0]
    assert num_rows.values == (2, 2)
    buffers = strategy.run(lambda: model.running_mean.item()).values  # type: ignore[union-attr]
    assert buffers == (2.0, 7.0, 2.0)
    (batch,) = strategy.distribute_dataset(data)
    zero = strategy.run(lambda b: len(b), args=(batch,), options=rd.RunOptions(empty_batch="zero_rows"))
    assert zero.values == (2, 2, 0)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_buffers_of_any_layout_are_taken_over_by_who_stood_in(two: rd.MirroredStrategy) -> None:
    makers: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: torch.ones(1).expand(4),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
    )
    for make in makers:
        with two.scope():
            model = nn.Linear(1, 1)
            model.register_buffer("held", make())

        def step(rows: torch.Tensor, model: Any = model) -> None:
            held: Any = model.held
            factor = 1 + len(rows) * rd.get_replica_context().replica_id_in_sync_group
            if held.layout is torch.strided:  # torch does not write to an expanded one
                model.held = held * factor
            else:
                held.mul_(factor)

        for rows in two.distribute_dataset(rd.Dataset.from_tensor_slices(torch.ones(3, 1)).batch(2)):
            two.run(step, args=(rows,))
        # Of the second batch the first replica has the only row: what it had made of the buffer is what both have.
        found = two.local_results(two.run(lambda model: model.held.to_dense(), args=(model,)))
        assert all(torch.equal(one, make().to_dense()) for one in found), make().layout


def test_a_replica_that_stands_in_adds_nothing_to_collectives(mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def step(x: torch.Tensor) -> dict[str, Any]:
        ctx = rd.get_replica_context()
        weight.grad = None
        count = ctx.all_reduce("SUM", len(x))
        ((weight * x).sum() / count).backward()
        assert weight.grad is not None
        return {
            "grad": weight.grad.item(),
            "count": count.item(),
            "mean": ctx.all_reduce("MEAN", x.sum()).item(),
            "min": ctx.all_reduce("MIN", x.min()).item(),
            "max": ctx.all_reduce("MAX", x.max()).item(),
            "all": ctx.all_gather(x, 0),
            "merged": ctx.merge_call(lambda s, r: s.reduce("SUM", r, axis=0), args=(x,)).item(),
            "own": ctx.merge_call(lambda s, r: rd.PerReplica([len(each) for each in r.values]), args=(x,)),
        }

    data = rd.Dataset.from_tensor_slices(np.array([8.0, 4.0])).batch(2)
    (batch,) = strategy.distribute_dataset(data)
    result = strategy.run(step, args=(batch,), options=rd.RunOptions(gradient_reduce_op="SUM"))  # type: ignore[arg-type]
    found = {name: strategy.local_results(leaf)[0] for name, leaf in result.items() if name != "all"}
    assert found == {"grad": 6.0, "count": 2, "mean": 6.0, "min": 4.0, "max": 8.0, "merged": 12.0, "own": 1}
    assert result["all"].values[0].tolist() == [8.0, 4.0]


def whole_and_state(strategy: rd.MirroredStrategy) -> list[int]:
    """Sums of the batches of a dataset, half of it read by the driver, the rest behind its state by the replicas."""
    dataset = strategy.distribute_dataset(rd.Dataset.range(8).batch(4))
    iterator = iter(dataset)
    sums = [int(strategy.reduce("SUM", strategy.run(lambda x: x.sum(), args=(next(iterator),)), axis=None))]
    resumed = iter(dataset)
    resumed.load_state_dict(iterator.state_dict())
    rest = strategy.run(lambda batches: sum(int(x.sum()) for x in batches), args=(resumed,))
    return [*sums, sum(rest.values)]


def test_distributed_iterators_work_in_threads_and_event_loops(two: rd.MirroredStrategy) -> None:
    async def in_a_loop() -> list[int]:
        return whole_and_state(two)

    async def beside_a_loop() -> list[int]:
        return await asyncio.to_thread(whole_and_state, two)

    found = [whole_and_state(two), asyncio.run(in_a_loop()), asyncio.run(beside_a_loop())]
    thread = threading.Thread(target=lambda: found.append(whole_and_state(two)))
    thread.start()
    thread.join()
    assert found == [[6, 22]] * 4
