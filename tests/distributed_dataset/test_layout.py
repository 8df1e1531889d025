"""Which pipelines a distributed dataset has. What they give: `test_sharding.py`."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from raydist.actors.epochs.job import InputJob, MergedJob
from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.dataset.readers import TextLineDataset
from raydist.distributed_dataset import InputSide, distribute
from raydist.distributed_dataset.layout import InputLayout, chosen_policy
from raydist.options import AutoShardPolicy, InputOptions, Options, Timeouts
from tests.actors.readers.fakes import FakeHost, fake_side

OPTIONS = InputOptions(num_input_workers=0)
FILE, DATA, OFF, AUTO = AutoShardPolicy.FILE, AutoShardPolicy.DATA, AutoShardPolicy.OFF, AutoShardPolicy.AUTO


@pytest.fixture
def lines(tmp_path: Path) -> Dataset:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_text("1\n2\n")
    return TextLineDataset(paths).batch(2)


def job(layout: InputLayout, replicas: int, workers: int) -> InputJob | MergedJob:
    side = InputSide(FakeHost(), replicas, Timeouts(), lambda: None, num_workers=workers)
    return layout.job(side, seed=3, epoch=1, options=Options(), input_options=OPTIONS)


def test_with_one_worker_all_policies_are_the_same(lines: Dataset) -> None:
    for policy in AutoShardPolicy:
        assert chosen_policy(lines._op, policy, 1) is DATA
        assert len(InputLayout.of_batches(Dataset.range(3).batch(1)._op, policy, 1).of_workers) == 1


def test_auto_is_decided_by_the_source(lines: Dataset) -> None:
    assert chosen_policy(lines._op, AUTO, 2) is FILE
    assert chosen_policy(Dataset.range(3)._op, AUTO, 2) is DATA
    assert [chosen_policy(lines._op, policy, 2) for policy in (FILE, DATA, OFF)] == [FILE, DATA, OFF]


def test_one_pipeline_serves_all_under_data(lines: Dataset) -> None:
    whole = job(InputLayout.of_batches(lines._op, DATA, 2), 4, 2)
    assert isinstance(whole, InputJob)
    assert (whole.num_replicas, whole.num_pieces, whole.label) == (4, None, "epoch 1 of the distributed dataset")
    alone = job(InputLayout.of_batches(lines._op, DATA, 1), 4, 1)
    assert isinstance(alone, InputJob)
    assert (whole.serves_workers, alone.serves_workers) == (True, False)


@pytest.mark.parametrize("policy", [FILE, OFF])
def test_each_worker_has_a_pipeline_of_its_own(lines: Dataset, policy: AutoShardPolicy) -> None:
    whole = job(InputLayout.of_batches(lines._op, policy, 2), 4, 2)
    assert isinstance(whole, MergedJob)
    assert (whole.num_replicas, whole.num_pipelines, whole.timeouts) == (4, 1, Timeouts())
    assert [(part.num_replicas, part.num_pieces, part.seed, part.epoch) for part in whole.jobs] == [(2, 4, 3, 1)] * 2
    assert [part.label[-13:] for part in whole.jobs] == ["worker 0 of 2", "worker 1 of 2"]
    assert (whole.jobs[0].ops == whole.jobs[1].ops) is (policy is OFF)
    assert [len(pickle.loads(part.ops)) for part in whole.jobs] == [1, 1]


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
