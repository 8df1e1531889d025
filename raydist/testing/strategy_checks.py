"""Checks of one strategy: its variables and metrics, objects from outside the scope, errors, copies, and closing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed
import torchmetrics
from torch import nn

import raydist as rd

TOLERANCE = 1e-9

GLOBAL_BATCHES = ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10])  # uneven on two replicas; the last has one row


def batches_of(strategy: rd.Strategy) -> Any:
    return strategy.distribute_dataset(rd.Dataset.range(11).batch(5))


def on_all(strategy: rd.Strategy, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function and return the result of each replica."""
    return list(strategy.local_results(strategy.run(fn, args=args)))


def check_state_dict(strategy: rd.Strategy) -> None:
    """Check that state dicts hold the replicas' values, and that loaded state dicts continue training identically."""
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


class Counts(nn.Module):
    """A module that counts rows in two buffers, and holds the number of rows of the last batch."""

    read: torch.Tensor
    written: torch.Tensor
    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("read", "written", "last"):
            self.register_buffer(name, torch.tensor(0))
        rd.set_aggregation(self, "read", aggregation="sum")
        rd.set_aggregation(self, "written", aggregation="sum", synchronization="on_write")
        rd.set_aggregation(self, "last", aggregation="first", synchronization="on_write")


def check_aggregation(strategy: rd.Strategy) -> None:
    """Check that SUM buffers count the rows of all replicas, also after loading a value and in a loop in a step."""
    with strategy.scope():
        counts = Counts()

    def step(batch: torch.Tensor) -> None:
        counts.read.add_(len(batch))
        counts.written.add_(len(batch))
        counts.last.fill_(rd.get_replica_context().global_num_rows or 0)

    def loop(batches: Any) -> None:
        for batch in batches:
            step(batch)

    def held() -> list[int]:
        return [int(value) for value in counts.state_dict().values()]

    for batch, rows in zip(batches_of(strategy), GLOBAL_BATCHES, strict=True):
        strategy.run(step, args=(batch,))
        assert held() == [rows[-1] + 1, rows[-1] + 1, len(rows)]
    assert on_all(strategy, lambda: int(counts.written)) == [11] * strategy.num_replicas_in_sync
    counts.load_state_dict({"read": torch.tensor(100), "written": torch.tensor(200), "last": torch.tensor(300)})
    assert sum(on_all(strategy, lambda: int(counts.read))) == 100
    strategy.run(loop, args=(iter(batches_of(strategy)),))
    assert held()[:2] == [111, 211]


def check_late_parameters(strategy: rd.Strategy) -> None:
    """Check that later parameters of the scope are trained, and that errors name parameters from outside the scope."""
    with strategy.scope():
        model: Any = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(x.double()[:, None]) * getattr(model, "scale", 1.0)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def changes(parameter: nn.Parameter) -> bool:
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.fill_(0.5)
        strategy.local_results([strategy.run(step, args=(batch,)) for batch in batches_of(strategy)])
        return not torch.equal(parameter.detach(), before) and not bool((parameter == 0.5).all())

    assert changes(model[0].weight)
    with strategy.scope():
        model[1] = nn.Linear(2, 1).double()
        optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.25})
        model.register_parameter("scale", nn.Parameter(torch.ones((), dtype=torch.float64)))
        optimizer.add_param_group({"params": [model.scale]})
    assert changes(model[1].weight)
    assert changes(model.scale)
    kept = model[1]
    model[1] = nn.Linear(2, 1).double()
    with pytest.raises(rd.FailedPreconditionError, match="'1.weight' of module Sequential"):
        strategy.run(step, args=(torch.ones(1),))
    model[1] = kept
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(rd.FailedPreconditionError, match=r"param_groups\[3\] of optimizer SGD was not"):
        strategy.run(step, args=(torch.ones(1),))
    del optimizer.param_groups[3]
    assert changes(model[1].weight)


def check_origin(strategy: rd.Strategy) -> None:
    """Check that errors name an object created outside the scope, however a step references the object."""
    outside, norm = nn.Linear(1, 1), nn.BatchNorm1d(1, affine=False)
    sgd = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with strategy.scope():
        inside = nn.Linear(1, 1)
        lazy = nn.LazyLinear(1)
    uses: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: outside(torch.ones(1)), "parameter 'weight' of module Linear was not"),
        (lambda: norm.training, "a BatchNorm1d was not"),
        (lambda: sgd.step(), r"param_groups\[0\] of optimizer SGD was not"),
        (copy.deepcopy(inside).extra_repr, "parameter 'weight' of module Linear was not"),
        (lambda: lazy.training, "parameter 'weight' of module LazyLinear is lazy"),
    )
    for use, message in uses:
        with pytest.raises(rd.FailedPreconditionError, match=message):
            strategy.run(use)
    with pytest.raises(rd.FailedPreconditionError, match="under the scope of .*Linear was not"):
        strategy.run(len, args=([outside],))
    with strategy.scope():
        twin = copy.deepcopy(inside)
        lazy(torch.ones(1, 3))
    shapes = on_all(strategy, lambda: (tuple(twin.weight.shape), tuple(lazy.weight.shape)))
    assert shapes == [((1, 1), (1, 3))] * strategy.num_replicas_in_sync


def metrics_of_rows() -> Any:
    """Return metrics with different kinds of states: sums, averages, and lists of all rows."""
    classification, regression = torchmetrics.classification, torchmetrics.regression
    return torchmetrics.MetricCollection(
        {
            "auroc": classification.BinaryAUROC(),
            "accuracy": classification.BinaryAccuracy(),
            "confusion": classification.BinaryConfusionMatrix(),
            "squares": regression.MeanSquaredError(),
        }
    )


def scored(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a score and a label for each row."""
    return (x * 7 % 11) / 11, x % 2


def check_metrics(strategy: rd.Strategy) -> None:
    """Check that metrics over uneven batches equal those of one device, with rows in order."""
    with strategy.scope():
        metrics, values, peak = metrics_of_rows(), torchmetrics.CatMetric(), torchmetrics.MaxMetric()
        correlation = torchmetrics.regression.PearsonCorrCoef()
    alone, rows = metrics_of_rows(), torch.arange(11)
    expected = torchmetrics.functional.pearson_corrcoef(rows.float(), scored(rows)[0])

    def step(x: torch.Tensor) -> None:
        metrics.update(*scored(x))
        values(x.double())  # forward
        peak.update(x.double())
        correlation.update(x.float(), scored(x)[0])

    def restart() -> None:
        values.reset()

    for _ in range(2):
        for batch, numbers in zip(batches_of(strategy), GLOBAL_BATCHES, strict=True):
            strategy.run(step, args=(batch,))
            alone.update(*scored(torch.tensor(numbers)))
        torch.testing.assert_close(metrics.compute(), alone.compute())
        assert values.compute().tolist() == rows.tolist()
        assert peak.compute().item() == 10
        torch.testing.assert_close(correlation.compute(), expected)
        metrics.reset()
        alone.reset()
        strategy.run(restart)
        correlation.reset()
    assert values.update_count == 0


def _look_up(name: str) -> int:
    nothing: dict[str, int] = {}
    return nothing[name]


def check_errors(strategy: rd.Strategy) -> None:
    """Check that a step's error keeps its type and is raised no later than the result; check errors of bad calls."""
    with pytest.raises(KeyError, match="mine"):
        on_all(strategy, _look_up, "mine")
    assert on_all(strategy, lambda: "goes on") == ["goes on"] * strategy.num_replicas_in_sync
    with pytest.raises(rd.FailedPreconditionError, match="not inside of another run|is for the driver"):
        strategy.local_results(strategy.run(lambda: rd.get_strategy().run(len)))
    with pytest.raises(rd.InvalidArgumentError, match="needs a function, got 3"):
        strategy.run(3)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(rd.InvalidArgumentError, match="args must be a tuple"):
        strategy.run(len, args=3)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(rd.InvalidArgumentError, match="kwargs must be a dict"):
        strategy.run(len, kwargs=[1])  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(rd.InvalidArgumentError, match=r"options must be rd.RunOptions\(...\), got 3"):
        strategy.run(len, options=3)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(rd.InvalidArgumentError, match="got a DistributedDataset"):
        strategy.run(len, args=(batches_of(strategy),))
    with pytest.raises(rd.SpecError, match=r"raydist.Dataset or a torch DataLoader must be given, got list"):
        strategy.distribute_dataset([1, 2])  # type: ignore[arg-type]  # wrong on purpose
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
    """Check that closing fetches the last values, may be repeated and ends all use, also after an error in `with`."""
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
