"""A distributed dataset for one replica in this process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.distributed_dataset import LocalDistributedDataset
from raydist.options import InputOptions
from raydist.pipelines.elements.spec import TensorSpec


def test_local_batches_are_plain_tensors_on_the_device() -> None:
    dataset = LocalDistributedDataset(Dataset.range(3).batch(2), device=torch.device("meta"))
    assert [batch.device.type for batch in dataset] == ["meta", "meta"]
    assert dataset.element_spec == TensorSpec((None,), np.int64)
    assert dataset.cardinality() == 2


def test_one_replica_wants_batches_too() -> None:
    pairs = Dataset.range(3).map(lambda x: {"row": [x, x], "label": x})
    with pytest.raises(InvalidArgumentError, match="must have rows to split .* got a scalar 'label' of type int64"):
        next(iter(LocalDistributedDataset(pairs)))
    assert [int(x) for x in LocalDistributedDataset(Dataset.range(3), dealt=True)] == [0, 1, 2]


def test_batches_may_stay_on_the_host() -> None:
    options = InputOptions(experimental_fetch_to_device=False)
    dataset = LocalDistributedDataset(Dataset.range(3).batch(2), device=torch.device("meta"), options=options)
    assert [batch.tolist() for batch in dataset] == [[0, 1], [2]]
