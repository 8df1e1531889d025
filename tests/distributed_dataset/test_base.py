"""Epochs and seeds of distributed datasets, and options that are for some of them only."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.dataset import Dataset
from raydist.distributed_dataset import distribute
from raydist.distributed_dataset.base import require_shared
from raydist.options import InputOptions, InputReplicationMode, Options
from raydist.strategies.one_device import OneDeviceStrategy
from tests.actors.readers.fakes import fake_side

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
