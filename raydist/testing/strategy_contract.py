"""The contract of every strategy, as checks; `check_strategy` runs all of them.

A check gets a strategy that other checks have used and will use again, and leaves the strategy usable; `check_closing`
gets a function that makes a new strategy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raydist as rd
from raydist.strategies.synchronous import SynchronousStrategy
from raydist.testing.strategy_checks import (
    GLOBAL_BATCHES,
    TOLERANCE,
    batches_of,
    check_aggregation,
    check_bad_steps,
    check_closing,
    check_copies,
    check_errors,
    check_late_parameters,
    check_metrics,
    check_origin,
    check_state_dict,
    check_two_at_once,
    on_all,
)
from raydist.testing.training_program import MODELS, Program, train_alone, train_distributed

__all__ = [
    "CHECKS",
    "check_batches",
    "check_closing",
    "check_collectives",
    "check_program",
    "check_strategy",
    "check_training",
    "check_values",
    "checks_of",
]


def check_program(program: Program, strategy: rd.Strategy) -> None:
    """Check that N replicas train as one device: losses and weights equal a bare PyTorch loop on the global batches."""
    alone, distributed = train_alone(program), train_distributed(program, strategy)
    for name, value in alone.after.items():
        message = f"{name} differs from the bare loop's"
        torch.testing.assert_close(distributed.after[name], value, rtol=TOLERANCE, atol=1e-12, msg=message)
    assert distributed.losses == pytest.approx(alone.losses, rel=TOLERANCE), "losses differ from the bare loop's"
    before, after = distributed.before, distributed.after
    assert any(not torch.equal(before[name], after[name]) for name in before), "nothing was trained"


def check_training(strategy: rd.Strategy) -> None:
    """Check one fixed program per model, with batch sizes that no number of replicas divides."""
    for model in sorted(MODELS):
        program = Program(model, "adamw", num_rows=11, batch_size=4, clip=True, accumulate=2, schedule=True, seed=3)
        check_program(program, strategy)


def check_gradient_reduction(strategy: rd.Strategy) -> None:
    """Check that MEAN weighs gradients by rows, and that SUM in one run adds gradients of `compute_average_loss`."""
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


def check_orders(strategy: rd.Strategy) -> None:
    """Check that gradients are reduced correctly if replicas use parameters in different orders."""
    with strategy.scope():
        layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(4)).double()
    for layer in layers:
        nn.init.ones_(layer.get_parameter("weight"))

    def step(x: torch.Tensor) -> None:
        rank = rd.get_replica_context().replica_id_in_sync_group
        layers.zero_grad()
        value = x.double()[:, None]
        for index in sorted(range(4), key=lambda index: (index * 3 + rank * 2) % 5):
            value = layers[index](value)
        value.mean().backward()

    for batch, rows in zip(batches_of(strategy), GLOBAL_BATCHES, strict=True):
        strategy.run(step, args=(batch,))
        for parameter in layers.parameters():
            assert parameter.grad is not None
            assert parameter.grad.item() == pytest.approx(np.mean(rows))


def check_local_updates(strategy: rd.Strategy) -> None:
    """Check that gradients are the mean over the replica's own rows, and None for a replica without rows."""
    with strategy.scope():
        weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def gradient_of(x: torch.Tensor) -> tuple[float | None, list[float]]:
        weight.grad = None
        (weight * x.double()).mean().backward()
        return None if weight.grad is None else weight.grad.item(), x.double().tolist()

    options = rd.RunOptions(empty_batch="zero_rows")  # all replicas run the step
    for batch in batches_of(strategy):
        for gradient, rows in strategy.local_results(strategy.run(gradient_of, args=(batch,), options=options)):
            assert gradient == (pytest.approx(np.mean(rows)) if rows else None)


def check_numbers(strategy: rd.Strategy) -> None:
    """Check that driver and replicas agree on the numbers of replicas and devices."""
    count = strategy.num_replicas_in_sync
    assert count >= 1
    assert [type(name) for name in strategy.worker_devices] == [str] * count

    def numbers() -> tuple[int, int, tuple[str, ...]]:
        context = rd.get_replica_context()
        return context.replica_id_in_sync_group, context.num_replicas_in_sync, context.strategy.worker_devices

    assert on_all(strategy, numbers) == [(rank, count, strategy.worker_devices) for rank in range(count)]


def check_values(strategy: rd.Strategy) -> None:
    """Check that reduce, gather and local_results count every row of uneven batches once."""
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
    """Check that steps know their rows, all kinds of input give every row, and an empty dataset gives no batch."""

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
    """Check the collective calls of a step's replica context."""
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
    """Check the current strategy inside the scope, in a step, and outside of both."""
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


Found = tuple[bool, bool, str, str, bool, str, bool]


def _modes() -> Found:
    product = torch.ones(2, 2, dtype=torch.float32) @ torch.ones(2, 2, dtype=torch.float32)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        str(product.dtype),
        str(torch.ones(1).dtype),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_anomaly_enabled(),
    )


@contextlib.contextmanager
def _globally() -> Iterator[None]:
    """Set another default dtype, deterministic algorithms, and a lower matmul precision inside the block."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")


_BLOCKS: tuple[Callable[[], AbstractContextManager[object]], ...] = (
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.autograd.set_detect_anomaly(True),
    _globally,
)


def check_modes(strategy: rd.Strategy) -> None:
    """Check that steps run with the caller's `no_grad`, `autocast`, default dtype, ..., and only while these hold."""
    usual = _modes()
    for block in _BLOCKS:
        with block():
            here = _modes()
            assert on_all(strategy, _modes) == [here] * strategy.num_replicas_in_sync
        assert here != usual
        assert on_all(strategy, _modes) == [usual] * strategy.num_replicas_in_sync


def check_inference_mode(strategy: rd.Strategy) -> None:
    """Check that values and states read under `torch.inference_mode` are ordinary tensors for later steps."""
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch.float()[:, None]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for batch in batches_of(strategy):
        strategy.run(train, args=(batch,))
        with torch.inference_mode():
            outputs = strategy.gather(strategy.run(lambda batch: model(batch.float()[:, None]), args=(batch,)))
            rows = strategy.gather(batch).float()[:, None]
            torch.testing.assert_close(outputs, model(rows).to(outputs))
            assert model.weight.grad is not None
            assert optimizer.state_dict()["state"]
            state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state)
    assert not model.weight.is_inference()


CHECKS: tuple[Callable[[rd.Strategy], None], ...] = (
    check_numbers,
    check_values,
    check_batches,
    check_collectives,
    check_scope,
    check_gradient_reduction,
    check_orders,
    check_modes,
    check_inference_mode,
    check_copies,
    check_state_dict,
    check_aggregation,
    check_metrics,
    check_late_parameters,
    check_origin,
    check_errors,
    check_bad_steps,
    check_two_at_once,
    check_training,
)


# Checks that do not apply to strategies whose replicas train on their own gradients.
_NEED_GLOBAL_GRADIENTS = (
    check_gradient_reduction,
    check_orders,
    check_state_dict,
    check_inference_mode,  # compares results of all replicas with a computation on the driver
    check_training,
)


def checks_of(strategy: rd.Strategy) -> tuple[Callable[[rd.Strategy], None], ...]:
    """Return the checks that apply to a strategy: all, or the ones for local updates."""
    if not isinstance(strategy, SynchronousStrategy) or strategy.replica_rules().exchanges_gradients:
        return CHECKS
    return (*(check for check in CHECKS if check not in _NEED_GLOBAL_GRADIENTS), check_local_updates)


def check_strategy(make: Callable[[], rd.Strategy]) -> None:
    """Check everything that a strategy promises; strategies from other projects can use this check as well.

    Args:
        make: Makes a new strategy; called several times. The check closes each strategy.

    Raises:
        AssertionError: The strategy breaks a promise.
    """
    check_closing(make)
    with make() as strategy:
        for check in checks_of(strategy):
            check(strategy)
