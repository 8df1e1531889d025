"""Checks of errors, copies, two strategies at once, and closing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import cloudpickle
import pytest
import torch
import torch.distributed
from torch import nn

import raydist as rd
from raydist.testing.strategy_calls import batches_of, on_all


def _look_up(name: str) -> int:
    nothing: dict[str, int] = {}
    return nothing[name]


def check_errors(strategy: rd.Strategy) -> None:
    """Check that a step's error keeps its type and is raised at the latest with the result, and errors of bad calls."""
    with pytest.raises(KeyError, match="mine"):
        on_all(strategy, _look_up, "mine")
    assert on_all(strategy, lambda: "goes on") == ["goes on"] * strategy.num_replicas_in_sync
    with pytest.raises(rd.FailedPreconditionError, match="not inside of another run|is for the driver"):
        strategy.local_results(strategy.run(lambda: rd.get_strategy().run(len)))
    with pytest.raises(rd.InvalidArgumentError, match="needs a function, got 3"):
        strategy.run(3)  # type: ignore[arg-type]  # the point
    with pytest.raises(rd.InvalidArgumentError, match="args must be a tuple"):
        strategy.run(len, args=3)  # type: ignore[arg-type]  # the point
    with pytest.raises(rd.InvalidArgumentError, match="kwargs must be a dict"):
        strategy.run(len, kwargs=[1])  # type: ignore[arg-type]  # the point
    with pytest.raises(rd.InvalidArgumentError, match=r"options must be rd.RunOptions\(...\), got 3"):
        strategy.run(len, options=3)  # type: ignore[arg-type]  # the point
    with pytest.raises(rd.InvalidArgumentError, match="got a DistributedDataset"):
        strategy.run(len, args=(batches_of(strategy),))
    with pytest.raises(rd.SpecError, match=r"raydist.Dataset or a torch DataLoader must be given, got list"):
        strategy.distribute_dataset([1, 2])  # type: ignore[arg-type]  # the point
    with pytest.raises(rd.InvalidArgumentError, match="takes SUM or MEAN, got MAX"):
        strategy.reduce(rd.ReduceOp.MAX, 1.0)
    with pytest.raises(rd.InvalidArgumentError, match="needs values with dimension 0"):
        strategy.gather(torch.tensor(1.0))


def check_bad_steps(strategy: rd.Strategy) -> None:
    """Check that forbidden calls in a step raise clear errors, and that the strategy stays usable."""
    count = strategy.num_replicas_in_sync

    def rank() -> int:
        return rd.get_replica_context().replica_id_in_sync_group

    def enters_scope() -> bool:
        with rd.get_strategy().scope():
            return True

    with pytest.raises(rd.FailedPreconditionError, match="must be entered by the driver|scope is for the driver"):
        on_all(strategy, enters_scope)
    with pytest.raises(ValueError, match="process group has not been initialized") as caught:
        on_all(strategy, lambda: torch.distributed.all_reduce(torch.ones(1)) or 1)
    assert any("rd.get_replica_context().all_reduce" in note for note in caught.value.__notes__)
    for use, kind, message in (
        (
            lambda context: context.all_gather(torch.tensor(1.0)),
            rd.InvalidArgumentError,
            "needs values with a dimension 0",
        ),
        (lambda context: context.all_gather(torch.ones(1), "x"), rd.InvalidArgumentError, "as an int .*, got 'x'"),
        (lambda context: context.all_reduce("SUM", "text"), rd.SpecError, "Only tensors and numbers can be reduced"),
        (lambda context: context.merge_call(3), rd.InvalidArgumentError, "merge_call needs a function"),
    ):
        with pytest.raises(kind, match=message):
            on_all(strategy, lambda use=use: use(rd.get_replica_context()))
    if count > 1:
        with pytest.raises(rd.SpecError, match="must return one structure on all replicas, got .*'a'.*'b'"):
            on_all(strategy, lambda: {"ab"[rank() > 0]: 1})
        with pytest.raises(rd.InvalidArgumentError, match="all replicas must have one shape"):
            strategy.reduce("SUM", strategy.run(lambda: torch.ones(1 + rank())))
        with pytest.raises(rd.InvalidArgumentError, match="SUM over replicas needs a PerReplica"):
            strategy.reduce("SUM", torch.ones(1))
    assert on_all(strategy, rank) == list(range(count))


def check_two_at_once(strategy: rd.Strategy) -> None:
    """Check that two strategies work side by side, and that neither accepts the objects of the other."""
    with rd.OneDeviceStrategy("cpu") as other:
        with strategy.scope():
            mine = nn.Linear(1, 1)
        with other.scope():
            others = nn.Linear(1, 1)
        for _ in range(2):
            with torch.no_grad():
                strategy.run(lambda: mine.weight.data.fill_(2.0).sum())
                other.run(lambda: others.weight.data.fill_(3.0).sum())
        assert (mine.weight.item(), others.weight.item()) == (2.0, 3.0)
        for user, used in ((strategy, others), (other, mine)):
            with pytest.raises(rd.FailedPreconditionError, match="Linear (was not|belongs to another)"):
                user.run(lambda used=used: used.weight.sum())
            optimizer = torch.optim.SGD(used.parameters(), lr=0.1)
            with pytest.raises(rd.FailedPreconditionError, match="optimizer SGD was not|belongs to another"):
                user.run(lambda optimizer=optimizer: optimizer.step())
    mine.weight.data.fill_(4.0)
    assert on_all(strategy, lambda: mine.weight.item()) == [4.0] * strategy.num_replicas_in_sync


def check_copies(strategy: rd.Strategy) -> None:
    """Check that pickling or copying a strategy raises an error that says why."""
    for copied in (pickle.dumps, cloudpickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(rd.FailedPreconditionError, match="must stay in the process that made it"):
            copied(strategy)


def check_closing(make: Callable[[], rd.Strategy]) -> None:
    """Check that closing fetches the last values, may be repeated and ends all use; `with` closes after errors too."""
    with make() as strategy:
        with strategy.scope():
            weight = nn.Parameter(torch.zeros(()))
        strategy.run(lambda: weight.data.add_(1))
    assert weight.item() == 1.0
    assert type(weight) is nn.Parameter
    assert copy.deepcopy(weight).item() == 1.0
    strategy.close()
    for use in (
        lambda: strategy.run(len, args=([],)),
        lambda: batches_of(strategy),
        lambda: strategy.scope().__enter__(),
    ):
        with pytest.raises(rd.FailedPreconditionError, match="is closed and can't"):
            use()
    with pytest.raises(KeyError, match="mine"), make() as strategy:
        _look_up("mine")
    with pytest.raises(rd.FailedPreconditionError, match="is closed and can't"):
        strategy.run(len, args=([],))
