"""Common behaviour of all strategies: arguments of `run`, spellings of methods, contexts, input."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch import manual_seed, seed

import raydist as rd
from raydist.context import current as module
from raydist.context.current import (
    open_strategies,
    training_strategy,
)
from raydist.context.seed_calls import num_seed_calls
from raydist.context.strategy import Strategy
from raydist.core.errors import FailedPreconditionError
from raydist.core.values import PerReplica
from raydist.strategies.one_device import OneDeviceStrategy
from raydist.strategies.one_node import MirroredStrategy
from raydist.strategies.parameter_server import ParameterServerStrategy


def test_a_misspelled_method_is_an_attribute_error_and_leaving_with_closes() -> None:
    with rd.OneDeviceStrategy() as strategy, pytest.raises(AttributeError, match="no attribute 'distribute_datset'"):
        _ = strategy.distribute_datset
    with pytest.raises(rd.FailedPreconditionError, match="can't enter the scope"), strategy.scope():
        pass


def test_every_way_to_seed_counts() -> None:
    before = num_seed_calls()
    manual_seed(3)
    manual_seed(3)
    seed()
    assert num_seed_calls() - before == 3


def test_one_device_does_what_the_strategy_does() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    extended = strategy.extended
    assert extended.worker_devices == extended.parameter_devices == strategy.worker_devices
    values = PerReplica([torch.tensor(1.0), torch.tensor(3.0)])
    assert float(extended.reduce_to(rd.ReduceOp.MEAN, values, destinations=None)) == 2
    sums = extended.batch_reduce_to("SUM", [(values, None), ({"a": values}, "cpu")])
    assert (float(sums[0]), float(sums[1]["a"])) == (4, 4)
    assert extended.call_for_each_replica(lambda x, y: x - y, args=(3,), kwargs={"y": 1}) == 2


def test_update_writes_without_gradients() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    with strategy.scope(), strategy.extended.colocate_vars_with(None):
        layer = torch.nn.Linear(1, 1, bias=False)
    returned = strategy.extended.update(
        layer.weight, lambda w, value, scale: w.fill_(value * scale) is w, args=(2.0,), kwargs={"scale": 3}
    )
    assert returned is True
    assert layer.weight.item() == 6
    assert layer.weight.grad_fn is None


@pytest.mark.ray
def test_mirrored_variables_are_updated_on_every_replica(two: rd.MirroredStrategy) -> None:
    with two.scope():
        layer = torch.nn.Linear(1, 1, bias=False)
    assert len(two.extended.parameter_devices) == 2
    ids = two.extended.call_for_each_replica(lambda: rd.get_replica_context().replica_id_in_sync_group + 1.0)
    total = two.extended.reduce_to("SUM", ids, destinations=layer.weight)
    two.extended.update(layer.weight, lambda weight, value: weight.fill_(value), args=(total,))
    assert two.local_results(two.run(lambda: layer.weight.item())) == (3.0, 3.0)
    assert str(ids) == "PerReplica(0: 1.0, 1: 2.0)"
    batches = list(two.distribute_dataset(rd.Dataset.range(3).batch(3)))
    assert [repr(batch) for batch in batches] == ["PerReplica(0: tensor([0, 1]), 1: tensor([2]))"]


def test_runs_of_strategies_do_not_nest() -> None:
    makes: tuple[Callable[[], Strategy], ...] = (lambda: MirroredStrategy(2), lambda: ParameterServerStrategy(2, 1))
    for make in makes:
        with pytest.raises(FailedPreconditionError, match="not inside of another run"):
            OneDeviceStrategy().run(lambda make=make: make().run(lambda: None))


def made(*objects: int, closed: bool = False, default: bool = False) -> Any:
    """A strategy that has made these objects."""
    return SimpleNamespace(_closed=closed, _is_default=default, _has_made=objects.__contains__)


class Living(list[Any]):
    """Those of a process."""

    add = list.append


def living(monkeypatch: pytest.MonkeyPatch, *strategies: Any) -> None:
    found = Living(strategies)
    monkeypatch.setattr(module, "_living", lambda: found)


def test_the_only_one_that_is_open_or_the_one_that_made_the_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    one = made()
    living(monkeypatch, made(closed=True), one, made(default=True))
    assert training_strategy() is one
    assert open_strategies() == [one]
    living(monkeypatch, made(), made())
    assert training_strategy() is None
    living(monkeypatch)
    assert training_strategy() is None
    one, closed = made(1, 2), made(3, closed=True)
    living(monkeypatch, one, closed, made())
    assert training_strategy([7, 2]) is one
    assert training_strategy([3]) is closed
    assert training_strategy([1, 3]) is None
    assert training_strategy([7]) is None
    with (scope := rd.OneDeviceStrategy("cpu")).scope():
        assert training_strategy([1]) is scope


def test_strategies_are_known_as_long_as_they_live() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    assert strategy in module._living()
    number = len(module._living())
    del strategy
    gc.collect()
    assert len(module._living()) < number
