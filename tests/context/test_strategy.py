"""Common behaviour of all strategies: arguments of `run`, spellings of methods, contexts, input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed
from torch import manual_seed, seed

import raydist as rd
from raydist.context.run_call import require_call
from raydist.context.seed_calls import num_seed_calls
from raydist.core.values import PerReplica


def test_a_misspelled_method_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'distribute_datset'"):
        _ = rd.OneDeviceStrategy().distribute_datset


def test_leaving_with_closes() -> None:
    with rd.OneDeviceStrategy() as strategy:
        pass
    with pytest.raises(rd.FailedPreconditionError, match="can't enter the scope"), strategy.scope():
        pass


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((None, ()), "needs a function, got None"),
        ((len, "abc"), "args must be a tuple .*, got str"),
        ((len, (), ["key"]), r"kwargs must be a dict .*, got \['key'\]"),
        ((len, (), None, {"param_sync_every": True}), r"options must be rd.RunOptions\(...\), got {"),
    ],
)
def test_what_is_no_call_of_a_step(call: Sequence[Any], message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        require_call(*call)


def test_a_collective_of_torch_without_a_group_is_told_of_ours() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    with pytest.raises(ValueError, match="has not been initialized") as caught:
        strategy.run(lambda: torch.distributed.all_reduce(torch.ones(1)))
    assert "rd.get_replica_context().all_reduce" in caught.value.__notes__[0]


def test_every_way_to_seed_counts() -> None:
    before = num_seed_calls()
    manual_seed(3)
    manual_seed(3)
    seed()
    assert num_seed_calls() - before == 3


def test_rows_of_arrays_become_a_dataset() -> None:
    dataset = rd.OneDeviceStrategy().make_numpy_dataset({"x": [1, 2]})
    assert [element["x"].item() for element in dataset] == [1, 2]


@pytest.mark.parametrize("wrong", [[1, 2], None, range(3)])
def test_only_a_dataset_can_be_distributed(wrong: Any) -> None:
    with pytest.raises(rd.SpecError, match="Dataset"):
        rd.OneDeviceStrategy().distribute_dataset(wrong)


def test_collectives_of_the_only_replica_are_the_identity() -> None:
    context = rd.get_replica_context()
    assert context.all_reduce("SUM", {"a": 3.0})["a"].item() == 3.0
    assert context.all_reduce(rd.ReduceOp.MEAN, torch.tensor(3)).dtype is torch.float32
    assert context.all_gather(torch.tensor([1, 2])).tolist() == [1, 2]
    assert context.merge_call(lambda strategy, x: x + 1, args=(1,)) == 2
    with context.no_sync():
        assert context.num_rows is None
        assert context.global_num_rows is None


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
def test_mirrored_variables_are_updated_on_every_replica(ray_cluster: object) -> None:
    with rd.MirroredStrategy(2) as strategy:
        with strategy.scope():
            layer = torch.nn.Linear(1, 1, bias=False)
        assert len(strategy.extended.parameter_devices) == 2
        ids = strategy.extended.call_for_each_replica(lambda: rd.get_replica_context().replica_id_in_sync_group + 1.0)
        total = strategy.extended.reduce_to("SUM", ids, destinations=layer.weight)
        strategy.extended.update(layer.weight, lambda weight, value: weight.fill_(value), args=(total,))
        assert strategy.local_results(strategy.run(lambda: layer.weight.item())) == (3.0, 3.0)
        assert str(ids) == "PerReplica(0: 1.0, 1: 2.0)"
        batches = list(strategy.distribute_dataset(rd.Dataset.range(3).batch(3)))
        assert [repr(batch) for batch in batches] == ["PerReplica(0: tensor([0, 1]), 1: tensor([2]))"]


def test_a_whole_dataset_is_no_batch() -> None:
    dataset = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(2).batch(1))
    with pytest.raises(rd.InvalidArgumentError, match=r"got a DistributedDataset. Give args=\(iter\(dataset\),\)"):
        require_call(len, (dataset,))
