from __future__ import annotations

import pytest
import torch

import raydist as rd
from raydist.core.values import PerReplica


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
