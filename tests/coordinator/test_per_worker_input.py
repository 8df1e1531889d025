"""The dataset of each worker, without pipelines: those are in `tests/strategies/test_parameter_server.py`."""

from __future__ import annotations

import pickle
from typing import Any
from unittest import mock

import pytest

import raydist as rd
from raydist.coordinator.per_worker import (
    PerWorkerInput,
    PerWorkerIterator,
    PerWorkerValue,
    _job,
    _open_iterator,
    _seeds_of,
)


def rows(dataset: rd.Dataset, seed: int = 3) -> list[list[int]]:
    options = rd.Options(seed=seed)
    return [batch.tolist() for batch in dataset.with_options(options)]


def test_parts_of_one_dataset_are_shuffled_alike_and_copies_each_in_its_way() -> None:
    datasets = [rd.Dataset.range(4)] * 3
    assert len(set(_seeds_of(datasets, same=True))) == 1
    assert len(set(_seeds_of(datasets, same=False))) == 3
    assert _seeds_of([rd.Dataset.range(4).with_options(rd.Options(seed=7))] * 2, same=False) == [7, 7]


def test_a_worker_that_starts_again_leaves_out_what_was_used_in_the_same_order() -> None:
    dataset = rd.Dataset.range(20).shuffle(20).batch(2)
    job = _job(dataset, "job", 3, 0, rd.InputOptions(), rd.Timeouts())
    link = mock.MagicMock(key="pass")
    _open_iterator(link, [job], [dataset._op], rd.InputContext(1, 0, 1), drawn=4, generation=1)
    assert [call.args for call in link.keyed.call_args_list] == [("pass-0-0",), ("pass-0-1",)]
    (_, opened) = link.keyed.return_value.call.call_args.args
    (op,) = pickle.loads(opened.ops)
    assert rows(rd.Dataset(op)) == rows(dataset)[4:]


def test_a_function_must_return_a_dataset() -> None:
    unused: Any = None
    made = PerWorkerInput(lambda: 2, unused, unused, rd.Timeouts())
    with pytest.raises(rd.SpecError, match=r"The function must return an rd\.Dataset, got int"):
        made.dataset(lambda: 3, None, rd.InputOptions())  # type: ignore[arg-type, return-value]  # the point of this test


def test_an_iterator_is_for_schedule_only() -> None:
    iterator = PerWorkerIterator("it")
    for use in (next, iter):
        with pytest.raises(rd.FailedPreconditionError, match=r"Give it to coordinator\.schedule in args"):
            use(iterator)
    with pytest.raises(rd.InvalidArgumentError, match=r"It cannot be pickled"):
        pickle.dumps(PerWorkerValue("v"))
