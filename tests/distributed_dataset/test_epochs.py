"""What a distributed dataset remembers of its epochs: seed, how many began, where the last one is."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.dataset import Dataset
from raydist.distributed_dataset import DistributedDataset, LocalDistributedDataset, distribute
from raydist.distributed_dataset.base import require_shared
from raydist.options import InputOptions, InputReplicationMode
from raydist.pipelines.elements.spec import TensorSpec
from raydist.strategies.one_device import OneDeviceStrategy
from tests.actors.readers.fakes import fake_side

OPTIONS = InputOptions(num_input_workers=0)
Make = Callable[[], DistributedDataset]


def dataset() -> Dataset:
    return Dataset.range(12).shuffle(12).batch(4)


@contextmanager
def local() -> Iterator[Make]:
    yield lambda: LocalDistributedDataset(dataset())


@contextmanager
def distributed() -> Iterator[Make]:
    with fake_side(2) as side:
        yield lambda: distribute(dataset(), side, OPTIONS)


@pytest.fixture(params=[local, distributed])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    with request.param() as found:
        yield found


def rows(batch: Any) -> list[int]:
    values = getattr(batch, "values", None)
    parts = [batch] if values is None or callable(values) else values
    return [row for part in parts for row in part.tolist()]


def restored(make: Make, state: dict[str, Any]) -> DistributedDataset:
    other = make()
    other.load_state_dict(json.loads(json.dumps(state)))
    return other


def epochs(data: DistributedDataset, count: int) -> list[list[list[int]]]:
    return [[rows(batch) for batch in data] for _ in range(count)]


def test_the_next_iteration_finishes_the_epoch_that_was_saved_in_its_middle(make: Make) -> None:
    data = make()
    whole_epoch = iter(data)
    [next(whole_epoch) for _ in range(3)]
    iterator = iter(data)
    next(iterator)
    state = data.state_dict()
    rest = [rows(batch) for batch in iterator]
    assert len(rest) == 2
    after = epochs(data, 2)
    again = restored(make, state)
    assert epochs(again, 3) == [rest, *after]
    assert again.state_dict()["epochs"] == 4


def test_an_epoch_whose_end_was_seen_is_not_begun_again_and_else_leaves_an_empty_rest(make: Make) -> None:
    data = make()
    iterator = iter(data)
    [next(iterator) for _ in range(3)]
    again = restored(make, data.state_dict())
    assert epochs(again, 1) == [[]]
    assert next(iterator, None) is None
    state = data.state_dict()
    assert (state["epochs"], state["position"]) == (1, None)
    whole = restored(make, state)
    assert epochs(again, 2) == epochs(whole, 2) == epochs(data, 2)


def test_an_iterator_that_is_closed_or_dropped_counts_as_ended(make: Make) -> None:
    for how in ("closed", "dropped"):
        data = make()
        iterator = iter(data)
        next(iterator)
        if how == "closed":
            iterator.close()
        else:
            del iterator
        state = data.state_dict()
        assert state["position"] is None
        assert epochs(restored(make, state), 1) == epochs(data, 1), how


def test_a_batch_whose_step_did_not_begin_counts_as_not_drawn(make: Make) -> None:
    def state_before_draw(data: DistributedDataset, iterator: Iterator[Any]) -> Any:
        """The state without the batch that is drawn now, which a copy draws."""
        drawn = rows(next(iterator))
        with data._epochs.before_draw():
            state = data.state_dict()
        assert rows(next(iter(restored(make, state)))) == drawn
        return state

    data = make()
    iterator = iter(data)
    next(iterator)
    saved = data.state_dict()
    data._epochs.mark()
    assert state_before_draw(data, iterator) != data.state_dict()
    for _ in iterator:
        data._epochs.mark()
    first = state_before_draw(data, iter(data))
    assert (first["epochs"], first["position"]) == (1, None), "an epoch whose first step did not begin"
    again = restored(make, saved)
    assert again.state_dict() == saved, "what was restored can be saved before it goes on"
    assert state_before_draw(again, iter(again)) == saved


def test_what_is_no_state_of_this_pipeline_is_refused_and_changes_nothing() -> None:
    data, other = LocalDistributedDataset(dataset()), LocalDistributedDataset(Dataset.range(5).batch(2))
    iterator = iter(other)
    next(iterator)
    before = data.state_dict()
    states: list[tuple[Any, str]] = [
        (None, "must"),
        ({}, "must"),
        ({"version": 2, "seed": 1, "epochs": 1, "position": None}, "must"),
        ({"version": 1, "seed": -1, "epochs": 1, "position": None}, "must"),
        ({"version": 1, "seed": 1, "epochs": True, "position": None}, "must"),
        ({"version": 1, "seed": 1, "epochs": 0, "position": {}}, "must"),
        ({"version": 1, "seed": 1, "epochs": 1, "position": "middle"}, "must"),
        (other.state_dict(), "this pipeline"),
    ]
    for state, message in states:
        with pytest.raises(InvalidArgumentError, match=message):
            data.load_state_dict(state)
        assert data.state_dict() == before
    iterator.close()


def test_it_goes_back_to_where_a_step_began_that_lies_further_back() -> None:
    data = LocalDistributedDataset(Dataset.range(12).batch(2))
    iterator = iter(data)
    data._epochs.mark(10)
    for boundary in (11, 12, 13):
        next(iterator)
        data._epochs.mark(boundary)
    data._epochs.mark(14)  # of a step that drew nothing
    rests: dict[int, list[int]] = {}
    for undone in (11, 12, 13, 14, 15):
        with data._epochs.before_draw(undone):
            state = data.state_dict()
        again = LocalDistributedDataset(Dataset.range(12).batch(2))
        again.load_state_dict(state)
        rests[undone] = next(iter(again)).tolist()
    assert rests == {11: [0, 1], 12: [2, 3], 13: [4, 5], 14: [6, 7], 15: [6, 7]}
    assert data._epochs.first_undoable == 1
    iter(data)
    assert data._epochs.first_undoable == 15, "what was drawn before belongs to another epoch"


def test_it_goes_back_into_an_epoch_whose_end_was_seen_and_whose_iterator_is_gone() -> None:
    with distributed() as make:
        data = make()
        for boundary, _ in enumerate(data, 1):
            data._epochs.mark(boundary)
        rests = {}
        for undone in (1, 2, 3, 4):
            with data._epochs.before_draw(undone):
                state = data.state_dict()
            again = make()
            again.load_state_dict(state)
            rests[undone] = len(list(again))
    assert rests == {1: 3, 2: 2, 3: 1, 4: 3}, "after the end a new epoch"


def test_one_dataset_is_not_for_each_replica() -> None:
    require_shared(OPTIONS)
    batches = Dataset.range(4).batch(2)
    with fake_side(2) as side, pytest.raises(InvalidArgumentError, match="is for distribute_datasets_from_function"):
        distribute(batches, side, InputOptions(per_replica=True))
    each = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    with pytest.raises(InvalidArgumentError, match="is for distribute_datasets_from_function"):
        OneDeviceStrategy("cpu").distribute_dataset(batches, each)


def test_it_stays_in_its_process() -> None:
    """Iterated or not; a dataset that is not distributed travels."""
    with fake_side(2) as side:
        dataset = Dataset.range(4).batch(2)
        distributed = distribute(dataset, side, OPTIONS)
        copies: tuple[Callable[[Any], Any], ...] = (pickle.dumps, copy.copy, copy.deepcopy)
        for copied in copies:
            with pytest.raises(FailedPreconditionError, match=r"this PerReplicaDataset was .*copied.*iter\(dataset\)"):
                copied(distributed)
            assert len(list(distributed)) == 2
        pickle.loads(pickle.dumps(dataset))


def test_local_batches_are_plain_tensors_on_the_device_or_the_host() -> None:
    batches, meta = Dataset.range(3).batch(2), torch.device("meta")
    dataset = LocalDistributedDataset(batches, device=meta)
    assert [batch.device.type for batch in dataset] == ["meta", "meta"]
    assert (dataset.element_spec, dataset.cardinality()) == (TensorSpec((None,), np.int64), 2)
    on_host = LocalDistributedDataset(batches, device=meta, options=InputOptions(experimental_fetch_to_device=False))
    assert [batch.tolist() for batch in on_host] == [[0, 1], [2]]


def test_one_replica_wants_batches_too() -> None:
    pairs = Dataset.range(3).map(lambda x: {"row": [x, x], "label": x})
    with pytest.raises(InvalidArgumentError, match="must have rows to split .* got a scalar 'label' of type int64"):
        next(iter(LocalDistributedDataset(pairs)))
    assert [int(x) for x in LocalDistributedDataset(Dataset.range(3), dealt=True)] == [0, 1, 2]
