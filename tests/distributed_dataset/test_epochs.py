"""What a distributed dataset remembers of its epochs: seed, how many began, where the last one is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.distributed_dataset import DistributedDataset, LocalDistributedDataset, distribute
from raydist.options import InputOptions, Options
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


def test_an_epoch_whose_end_was_seen_is_not_begun_again(make: Make) -> None:
    data = make()
    epochs(data, 1)
    state = data.state_dict()
    assert (state["epochs"], state["position"]) == (1, None)
    assert epochs(restored(make, state), 2) == epochs(data, 2)


def test_an_end_that_was_not_seen_leaves_an_empty_rest(make: Make) -> None:
    data = make()
    iterator = iter(data)
    [next(iterator) for _ in range(3)]
    again = restored(make, data.state_dict())
    assert epochs(again, 1) == [[]]
    assert next(iterator, None) is None
    assert epochs(again, 1) == epochs(data, 1)


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_an_iterator_that_is_closed_or_dropped_counts_as_ended(make: Make, how: str) -> None:
    data = make()
    iterator = iter(data)
    next(iterator)
    if how == "closed":
        iterator.close()
    else:
        del iterator
    state = data.state_dict()
    assert state["position"] is None
    assert epochs(restored(make, state), 1) == epochs(data, 1)


def test_what_was_restored_can_be_saved_before_it_goes_on(make: Make) -> None:
    data = make()
    iterator = iter(data)
    next(iterator)
    state = data.state_dict()
    assert restored(make, state).state_dict() == state


def test_a_batch_whose_step_did_not_begin_counts_as_not_drawn(make: Make) -> None:
    data = make()
    iterator = iter(data)
    next(iterator)
    data._epochs.mark()
    drawn = rows(next(iterator))
    with data._epochs.before_draw():
        state = data.state_dict()
    assert rows(next(iter(restored(make, state)))) == drawn
    assert data.state_dict() != state


def test_an_epoch_whose_first_step_did_not_begin_counts_as_not_begun(make: Make) -> None:
    data = make()
    for _ in data:
        data._epochs.mark()
    iterator = iter(data)
    drawn = rows(next(iterator))
    with data._epochs.before_draw():
        state = data.state_dict()
    assert (state["epochs"], state["position"]) == (1, None)
    assert rows(next(iter(restored(make, state)))) == drawn


def test_a_restored_epoch_whose_first_step_did_not_begin_stays_where_it_was_restored(make: Make) -> None:
    first = make()
    iterator = iter(first)
    next(iterator)
    saved = first.state_dict()
    data = restored(make, saved)
    iterator = iter(data)
    drawn = rows(next(iterator))
    with data._epochs.before_draw():
        state = data.state_dict()
    assert state == saved
    assert rows(next(iter(restored(make, state)))) == drawn


def test_a_seed_that_was_drawn_is_restored() -> None:
    data = LocalDistributedDataset(dataset())
    state = data.state_dict()
    again = LocalDistributedDataset(dataset().with_options(Options(seed=7)))
    again.load_state_dict(state)
    assert epochs(again, 1) == epochs(data, 1)


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"version": 2, "seed": 1, "epochs": 1, "position": None},
        {"version": 1, "seed": -1, "epochs": 1, "position": None},
        {"version": 1, "seed": 1, "epochs": True, "position": None},
        {"version": 1, "seed": 1, "epochs": 0, "position": {}},
        {"version": 1, "seed": 1, "epochs": 1, "position": "middle"},
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(state: Any) -> None:
    data = LocalDistributedDataset(dataset())
    before = data.state_dict()
    with pytest.raises(InvalidArgumentError, match="must"):
        data.load_state_dict(state)
    assert data.state_dict() == before


def test_the_state_of_another_pipeline_is_refused_and_changes_nothing() -> None:
    other = LocalDistributedDataset(Dataset.range(5).batch(2))
    next(iterator := iter(other))
    data = LocalDistributedDataset(dataset())
    before = data.state_dict()
    with pytest.raises(InvalidArgumentError, match="this pipeline"):
        data.load_state_dict(other.state_dict())
    assert data.state_dict() == before
    iterator.close()


def pairs() -> DistributedDataset:
    return LocalDistributedDataset(Dataset.range(12).batch(2))


def test_it_goes_back_to_where_a_step_began_that_lies_further_back() -> None:
    data = pairs()
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
        again = pairs()
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
