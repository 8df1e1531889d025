"""Epochs and seeds of distributed datasets, and options that are for some of them only."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from raydist.actors.epochs.job import InputJob, MergedJob
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.dataset import Dataset
from raydist.distributed_dataset import InputSide, LocalDistributedDataset, distribute
from raydist.distributed_dataset.base import require_shared
from raydist.distributed_dataset.per_replica import InputLayout
from raydist.options import AutoShardPolicy, InputOptions, InputReplicationMode, Options, Timeouts
from raydist.pipelines.elements.spec import TensorSpec
from raydist.strategies.one_device import OneDeviceStrategy
from tests.actors.readers.fakes import FakeHost, fake_side

OPTIONS = InputOptions(num_input_workers=0)


def lists(batch: Any) -> list[Any]:
    return [value.tolist() for value in batch.values]


def test_every_iteration_is_an_epoch() -> None:
    dataset = Dataset.range(20).shuffle(20).batch(5)
    with fake_side(2) as side:
        seeded = dataset.with_options(Options(seed=1))
        twice = distribute(seeded, side, OPTIONS)
        first, second = ([lists(batch) for batch in twice] for _ in range(2))
        assert first != second
        assert [lists(batch) for batch in distribute(seeded, side, OPTIONS)] == first
        plain = [row for rows in seeded for row in rows.tolist()]
        assert [row for step in first for part in step for row in part] == plain


def test_an_order_that_is_kept_is_kept_without_a_seed() -> None:
    with fake_side(2) as side:
        dataset = distribute(Dataset.range(30).shuffle(30, reshuffle_each_iteration=False).batch(6), side, OPTIONS)
        assert [lists(batch) for batch in dataset] == [lists(batch) for batch in dataset]


def test_one_dataset_is_not_for_each_replica() -> None:
    require_shared(OPTIONS)
    batches = Dataset.range(4).batch(2)
    with fake_side(2) as side, pytest.raises(InvalidArgumentError, match="is for distribute_datasets_from_function"):
        distribute(batches, side, InputOptions(per_replica=True))
    each = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    with pytest.raises(InvalidArgumentError, match="is for distribute_datasets_from_function"):
        OneDeviceStrategy("cpu").distribute_dataset(batches, each)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_stays_in_its_process(copied: Callable[[Any], Any]) -> None:
    """Iterated or not; a dataset that is not distributed travels."""
    with fake_side(2) as side:
        dataset = Dataset.range(4).batch(2)
        distributed = distribute(dataset, side, OPTIONS)
        for _ in range(2):
            with pytest.raises(FailedPreconditionError, match=r"this PerReplicaDataset was .*copied.*iter\(dataset\)"):
                copied(distributed)
            assert len(list(distributed)) == 2
        pickle.loads(pickle.dumps(dataset))


def test_workers_have_equally_many() -> None:
    with pytest.raises(InvalidArgumentError, match="got 3 replicas on 2 workers"):
        _ = InputSide(FakeHost(), 3, Timeouts(), lambda: None, 2).replicas_per_worker


FILE, DATA, OFF, AUTO = AutoShardPolicy.FILE, AutoShardPolicy.DATA, AutoShardPolicy.OFF, AutoShardPolicy.AUTO


def job(layout: InputLayout, replicas: int, workers: int) -> InputJob | MergedJob:
    side = InputSide(FakeHost(), replicas, Timeouts(), lambda: None, num_workers=workers)
    return layout.job(side, seed=3, epoch=1, options=Options(), input_options=OPTIONS)


def test_elements_of_functions_go_to_workers_in_order() -> None:
    ops = [Dataset.range(number)._op for number in range(4)]
    per_replica = InputLayout.of_elements(ops, 2)
    assert per_replica.of_workers == ((ops[0], ops[1]), (ops[2], ops[3]))
    whole = job(per_replica, 4, 2)
    assert isinstance(whole, MergedJob)
    assert (whole.num_pipelines, [part.dealt for part in whole.jobs]) == (2, [True, True])
    assert [part.num_pieces for part in whole.jobs] == [None, None]


def test_a_function_that_cannot_be_pickled_is_named() -> None:
    import threading

    lock = threading.Lock()
    dataset = Dataset.range(3).map(lambda x: (lock, x)[1]).batch(2)
    with fake_side(2) as side, pytest.raises(InvalidArgumentError, match=r"must be picklable.*lock"):
        iter(distribute(dataset, side, OPTIONS))


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
