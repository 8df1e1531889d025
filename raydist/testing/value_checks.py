"""Replicas, what they are given, what they return and what they do together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd
from raydist.testing.strategy_calls import GLOBAL_BATCHES, batches_of, on_all

__all__ = ["check_batches", "check_collectives", "check_numbers", "check_scope", "check_values"]


def check_numbers(strategy: rd.Strategy) -> None:
    """Replicas and their devices are counted alike everywhere."""
    count = strategy.num_replicas_in_sync
    assert count >= 1
    assert [type(name) for name in strategy.worker_devices] == [str] * count

    def numbers() -> tuple[int, int, tuple[str, ...]]:
        context = rd.get_replica_context()
        return context.replica_id_in_sync_group, context.num_replicas_in_sync, context.strategy.worker_devices

    assert on_all(strategy, numbers) == [(rank, count, strategy.worker_devices) for rank in range(count)]


def check_values(strategy: rd.Strategy) -> None:
    """Uneven batches: reduce, gather and local_results count every row once."""
    for batch, rows in zip(batches_of(strategy), GLOBAL_BATCHES, strict=True):
        value = strategy.run(lambda x: x.double(), args=(batch,))
        assert strategy.gather(value).tolist() == rows
        assert strategy.reduce(rd.ReduceOp.SUM, value, axis=0).item() == sum(rows)
        assert strategy.reduce("MEAN", value, axis=0).item() == pytest.approx(np.mean(rows))
        assert torch.cat(strategy.local_results(value)).tolist() == rows
        assert strategy.gather({"nested": (value,)})["nested"][0].tolist() == rows
    ranks = strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    assert strategy.local_results(ranks) == tuple(range(strategy.num_replicas_in_sync))
    assert strategy.local_results("one value") == ("one value",)


def check_batches(strategy: rd.Strategy) -> None:
    """A step knows its rows; every way in gives every row; an empty dataset gives no batch."""

    def rows_of(batch: torch.Tensor) -> tuple[int | None, int | None]:
        context = rd.get_replica_context()
        return context.num_rows, context.global_num_rows

    for batch, rows in zip(batches_of(strategy), GLOBAL_BATCHES, strict=True):
        told = on_all(strategy, rows_of, batch)
        assert sum(own or 0 for own, _ in told) == len(rows)
        assert {total for _, total in told} == {len(rows)}

    def sum_of_all(batches: Any) -> int:
        return sum(rd.get_replica_context().all_reduce("SUM", batch.sum()).item() for batch in batches)

    totals = on_all(strategy, sum_of_all, iter(batches_of(strategy)))
    assert totals == [sum(range(11))] * strategy.num_replicas_in_sync

    pipelines: list[int] = []

    def per_replica(context: rd.InputContext) -> rd.Dataset:
        pipelines.append(context.input_pipeline_id)
        mine = rd.Dataset.range(8).shard(context.num_input_pipelines, context.input_pipeline_id)
        return mine.batch(context.get_per_replica_batch_size(2 * strategy.num_replicas_in_sync))

    batches = [strategy.gather(batch) for batch in strategy.distribute_datasets_from_function(per_replica)]
    dealt = torch.cat(batches).tolist()
    assert (dealt if len(pipelines) == 1 else sorted(dealt)) == list(range(8))
    assert list(strategy.distribute_dataset(rd.Dataset.range(0).batch(2))) == []


def check_collectives(strategy: rd.Strategy) -> None:
    """What replicas do together, in a step, over the ranks."""
    count = strategy.num_replicas_in_sync

    def together() -> tuple[Any, ...]:
        context = rd.get_replica_context()
        rank = context.replica_id_in_sync_group
        total = context.all_reduce(rd.ReduceOp.SUM, {"x": rank + 1})["x"].item()
        mean = context.all_reduce("mean", torch.tensor(float(rank))).item()
        gathered = context.all_gather(torch.full((rank + 1,), rank)).tolist()
        merged = context.merge_call(lambda it, x: it.num_replicas_in_sync * sum(it.local_results(x)), args=(rank,))
        return total, mean, gathered, merged

    total, ranks = count * (count + 1) // 2, [rank for rank in range(count) for _ in range(rank + 1)]
    assert on_all(strategy, together) == [(total, (count - 1) / 2, ranks, count * (total - count))] * count


def check_scope(strategy: rd.Strategy) -> None:
    """Who is current: in the scope, in a step, and outside of both."""
    with strategy.scope() as entered, strategy.scope():
        assert entered is strategy
        assert rd.get_strategy() is strategy
        assert rd.in_cross_replica_context()
        with pytest.raises(rd.FailedPreconditionError, match="must be left before another"):
            rd.OneDeviceStrategy("cpu").scope().__enter__()
    assert not rd.has_strategy()

    def inside() -> tuple[bool, bool, bool]:
        same = rd.get_strategy() is rd.get_replica_context().strategy
        return rd.has_strategy(), rd.in_cross_replica_context(), same

    assert on_all(strategy, inside) == [(True, False, True)] * strategy.num_replicas_in_sync
