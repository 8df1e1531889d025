"""What every strategy must keep, whatever runs underneath; `check_strategy` is all of it.

A check is given a strategy that others have used before and will use again, and leaves it usable; `check_closing` is
given a function that makes a new one.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

import raydist as rd
from tests.contracts.training_program import MODELS, Program, train_alone, train_distributed

__all__ = ["CHECKS", "check_closing", "check_program", "check_strategy"]

TOLERANCE = 1e-9
GLOBAL_BATCHES = ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10])  # uneven on two replicas, and too few rows for all at the end


def batches_of(strategy: rd.Strategy) -> Any:
    return strategy.distribute_dataset(rd.Dataset.range(11).batch(5))


def on_all(strategy: rd.Strategy, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What each replica returned."""
    return list(strategy.local_results(strategy.run(fn, args=args)))


def check_program(program: Program, strategy: rd.Strategy) -> None:
    """N replicas are one device on the same global batches: losses and weights are those of a bare PyTorch loop."""
    alone, distributed = train_alone(program), train_distributed(program, strategy)
    for name, value in alone.after.items():
        message = f"{name} differs from the bare loop's"
        torch.testing.assert_close(distributed.after[name], value, rtol=TOLERANCE, atol=1e-12, msg=message)
    assert distributed.losses == pytest.approx(alone.losses, rel=TOLERANCE), "losses differ from the bare loop's"
    before, after = distributed.before, distributed.after
    assert any(not torch.equal(before[name], after[name]) for name in before), "nothing was trained"


def check_training(strategy: rd.Strategy) -> None:
    """One fixed program of each model; batches and their last rest divide by no number of replicas."""
    for model in sorted(MODELS):
        program = Program(model, "adamw", num_rows=11, batch_size=4, clip=True, accumulate=2, schedule=True, seed=3)
        check_program(program, strategy)


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

    def per_replica(context: rd.InputContext) -> rd.Dataset:
        return rd.Dataset.range(8).batch(context.get_per_replica_batch_size(2 * strategy.num_replicas_in_sync))

    dealt = [strategy.gather(batch) for batch in strategy.distribute_datasets_from_function(per_replica)]
    assert torch.cat(dealt).tolist() == list(range(8))
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


def check_state_dict(strategy: rd.Strategy) -> None:
    """Models and optimizers save what the replicas hold, and training goes on from what is loaded as it did before."""
    with strategy.scope():
        model = nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch.double()[:, None]).square().mean().backward()
        optimizer.step()

    def train() -> dict[str, Any]:
        for batch in batches_of(strategy):
            strategy.run(step, args=(batch,))
        return {name: value.clone() for name, value in model.state_dict().items()}

    first = train()
    moments = optimizer.state_dict()
    saved = {key: value["momentum_buffer"].clone() for key, value in moments["state"].items()}
    second = train()
    assert not torch.equal(first["weight"], second["weight"]), "nothing was trained"
    model.load_state_dict(first)
    state = {key: {**value, "momentum_buffer": saved[key]} for key, value in moments["state"].items()}
    optimizer.load_state_dict({**moments, "state": state})
    again = train()
    for name, value in second.items():
        torch.testing.assert_close(again[name], value, rtol=TOLERANCE, atol=1e-12)


def check_gradient_reduction(strategy: rd.Strategy) -> None:
    """MEAN weighs by rows; SUM, asked for by the scope or by one run, adds what `compute_average_loss` gives."""
    with strategy.scope():
        weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def mean(x: torch.Tensor) -> None:
        weight.grad = None
        (weight * x.double()).mean().backward()

    def share(x: torch.Tensor) -> None:
        weight.grad = None
        rd.compute_average_loss(weight * x.double()).backward()

    added = rd.RunOptions(gradient_reduce_op=rd.ReduceOp.SUM)
    for batch, rows in zip(batches_of(strategy), GLOBAL_BATCHES, strict=True):
        strategy.run(mean, args=(batch,))
        assert weight.grad is not None
        assert weight.grad.item() == pytest.approx(np.mean(rows))
        strategy.run(share, args=(batch,), options=added)
        assert weight.grad.item() == pytest.approx(np.mean(rows))


def _look_up(name: str) -> int:
    nothing: dict[str, int] = {}
    return nothing[name]


def check_errors(strategy: rd.Strategy) -> None:
    """An error of a step keeps its type and comes at the latest with its result; wrong calls are named."""
    with pytest.raises(KeyError, match="mine"):
        on_all(strategy, _look_up, "mine")
    assert on_all(strategy, lambda: "goes on") == ["goes on"] * strategy.num_replicas_in_sync
    with pytest.raises(rd.FailedPreconditionError, match="not inside of another run|is for the driver"):
        strategy.local_results(strategy.run(lambda: rd.get_strategy().run(len)))
    with pytest.raises(rd.InvalidArgumentError, match="needs a function, got 3"):
        strategy.run(3)  # type: ignore[arg-type]  # the point
    with pytest.raises(rd.InvalidArgumentError, match="args must be a tuple"):
        strategy.run(len, args=3)  # type: ignore[arg-type]  # the point
    with pytest.raises(rd.InvalidArgumentError, match="got a DistributedDataset"):
        strategy.run(len, args=(batches_of(strategy),))
    with pytest.raises(rd.SpecError, match=r"raydist.Dataset must be given, got list"):
        strategy.distribute_dataset([1, 2])  # type: ignore[arg-type]  # the point
    with pytest.raises(rd.InvalidArgumentError, match="takes SUM or MEAN, got MAX"):
        strategy.reduce(rd.ReduceOp.MAX, 1.0)
    with pytest.raises(rd.InvalidArgumentError, match="needs values with dimension 0"):
        strategy.gather(torch.tensor(1.0))


def check_copies(strategy: rd.Strategy) -> None:
    """A strategy says why it cannot be pickled or copied, also from within what is."""
    for copied in (pickle.dumps, cloudpickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(rd.FailedPreconditionError, match="must stay in the process that made it"):
            copied(strategy)


CHECKS: tuple[Callable[[rd.Strategy], None], ...] = (
    check_numbers,
    check_values,
    check_batches,
    check_collectives,
    check_scope,
    check_gradient_reduction,
    check_copies,
    check_state_dict,
    check_errors,
    check_training,
)


def check_closing(make: Callable[[], rd.Strategy]) -> None:
    """Closing fetches the last values, may be done twice, and ends all use; `with` closes, after an error too."""
    with make() as strategy:
        with strategy.scope():
            weight = nn.Parameter(torch.zeros(()))
        strategy.run(lambda: weight.data.add_(1))
    assert weight.item() == 1.0
    strategy.close()
    for use in (
        lambda: strategy.run(len, args=([],)),
        lambda: batches_of(strategy),
        lambda: strategy.scope().__enter__(),
    ):
        with pytest.raises(rd.FailedPreconditionError, match="is closed and can't"):
            use()
    with pytest.raises(KeyError, match="mine"), make() as strategy:
        raise KeyError("mine")
    with pytest.raises(rd.FailedPreconditionError, match="is closed and can't"):
        strategy.run(len, args=([],))


def check_strategy(make: Callable[[], rd.Strategy]) -> None:
    """Everything above, for a strategy from outside of this project as well."""
    check_closing(make)
    with make() as strategy:
        for check in CHECKS:
            check(strategy)
