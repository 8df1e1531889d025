"""States of iterators: what they hold, and what is refused."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any

import numpy as np
import pytest

import raydist as rd
from raydist.core.errors import InvalidArgumentError
from raydist.core.nest import LEAF, flatten
from raydist.dataset import Dataset
from raydist.pipelines.elements.object_leaves import WholeLeaf
from raydist.pipelines.elements.saved_state import require_state, state_errors
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.joined_states import join_states, split_workers
from raydist.pipelines.run.split import cut_batch, deal
from raydist.pipelines.run.steps import Element, GlobalBatches, WorkerBatches, element_views
from tests.refused import check_refused


def test_states() -> None:
    good: list[Any] = [
        {},
        {"seed": -5, "at": {"next": 0, "names": ["a"], "ended": False, "none": None}, "skip": (1 << 63) - 1},
        {"at": {"left": -1}},
        {"orders": {"map-1": [0, [[1, 2]], 0, [[-1, 1]]]}},
    ]
    for state in good:
        assert require_state(state) is state
    endless: dict[str, Any] = {}
    endless["at"] = endless
    wrong: list[tuple[Any, str]] = [
        ({"skip": -1}, r"\['skip'\] must be from 0"),
        ({"at": {"left": -2}}, r"\['left'\] must be from -1"),
        (None, "the state must be a dict, got None"),
        ([], "the state must be a dict"),
        ({"at": {"next": -1}}, r"the state's part \['at'\]\['next'\] must be from 0"),
        ({"at": [0, 1 << 80]}, r"\['at'\]\[1\] must be from 0 to .* 81 bits"),
        ({"skip": 0.5}, r"\['skip'\] must be .* got 0.5"),
        ({"skip": float("nan")}, "got nan"),
        ({"at": {1: 2}}, r"\['at'\] must have keys of text, got 1"),
        ({"at": b"x"}, "got b'x'"),
        (endless, "deep"),
    ]
    check_refused(call, [(partial(require_state, state), where) for state, where in wrong])
    check_refused(call, [(lambda: require_state({"at": [10**5000]}), "bits")])


def test_errors_of_other_people_stay_what_they_are() -> None:
    with pytest.raises(KeyError, match="mine"), state_errors():
        dict[str, int]()["mine"]  # this file is a user's
    with pytest.raises(rd.DataLossError), state_errors():
        raise rd.DataLossError("x")


def saved(dataset: rd.Dataset, count: int = 3) -> Any:
    iterator = dataset.as_numpy_iterator()
    for _ in range(count):
        next(iterator)
    return json.loads(json.dumps(iterator.state_dict()))


def test_a_state_without_an_entry_is_refused() -> None:
    dataset = rd.Dataset.range(20).filter(lambda x: x > 2).take(14)
    state = saved(dataset)
    del state["at"]["at"]["input"]["at"]["input"]["next"]
    iterator = dataset.as_numpy_iterator()
    iterator.load_state_dict(state)
    for _ in range(2):  # and not that it goes on somewhere
        with pytest.raises(rd.InvalidArgumentError, match="the state must have an entry 'next'"):
            next(iterator)
    iterator.load_state_dict(saved(dataset))
    assert len(list(iterator)) == 11


def test_the_state_of_another_pipeline_is_refused() -> None:
    state = Dataset.range(10).batch(2).as_numpy_iterator().state_dict()
    with pytest.raises(InvalidArgumentError, match="must be of this pipeline"):
        Dataset.range(10).shuffle(2).as_numpy_iterator().load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match="must be of this pipeline"):
        Dataset.range(10).batch(2).as_numpy_iterator().load_state_dict({})


def interleaved(**settings: Any) -> Dataset:
    return Dataset.range(4).interleave(lambda x: Dataset.range(3), **{"cycle_length": 2, "block_length": 1, **settings})


def shuffled(**settings: Any) -> Dataset:
    return Dataset.range(10).shuffle(**{"buffer_size": 4, "seed": 1, **settings}).repeat(2)


def test_the_state_of_another_order_is_refused() -> None:
    """Elements would be missed, and others come twice."""
    table: list[tuple[Callable[..., Dataset], dict[str, Any], str]] = [
        (shuffled, {"seed": 2}, "shuffle-1 had .*seed=1, .* and has .*seed=2, .* now"),
        (shuffled, {"buffer_size": 5}, "had buffer_size=4, .* and has buffer_size=5,"),
        (shuffled, {"reshuffle_each_iteration": False}, "had .* reshuffle=True and has .* reshuffle=False now"),
        (interleaved, {"cycle_length": 3}, "interleave-1 had cycle_length=2, .* and has cycle_length=3,"),
        (interleaved, {"block_length": 2}, "had .* block_length=1 and has .* block_length=2 now"),
    ]
    for dataset, other, difference in table:
        state = saved(dataset(), 1)
        changed = dataset(**other).as_numpy_iterator()
        with pytest.raises(InvalidArgumentError, match=difference):
            changed.load_state_dict(state)
        assert len(list(changed)) == len(list(dataset())), "it is as it was"
        state.pop("settings")  # of a state that was saved before they were part of it
        dataset(**other).as_numpy_iterator().load_state_dict(state)


def test_joined_states() -> None:
    assert join_states([{"seed": 1, "at": 2}] * 50) == {"seed": 1, "at": 2, "inputs": [{}] * 50}, "said once"
    wrong: list[tuple[Any, str]] = [
        ({"inputs": [{}, {}]}, "it is of 2, and there are 3 now"),
        ({"at": 1}, "it is of 1, and there are 3 now"),
        ({"inputs": [{}, {}, 3]}, "must be a dict"),
        ({"inputs": "abc"}, "must be a list, got 'abc'"),
        ({"inputs": 3}, "must be a list, got 3"),
        ([], "must be a dict"),
    ]
    check_refused(call, [(partial(split_workers, state, 3, 1), message) for state, message in wrong])


def chain(count: int) -> Dataset:
    dataset = Dataset.range(3)
    for _ in range(count - 1):
        dataset = dataset.take(5)
    return dataset


def test_so_many_operations_may_follow_each_other() -> None:
    dataset = chain(200)
    assert pickle.loads(pickle.dumps(dataset))._op.chain_length == 200
    resumed = iter(dataset)
    resumed.load_state_dict(saved(dataset, 1))
    assert [int(x) for x in resumed] == [1, 2]
    assert "take-199" in dataset.explain()
    most = sys.getrecursionlimit() // 4
    with pytest.raises(InvalidArgumentError, match=rf"at most {most} operations in a row.*got {most + 1} up to take"):
        chain(800)
    assert chain(most)._op.chain_length == most
    parts = [Dataset.range(1) for _ in range(512)]
    with pytest.raises(InvalidArgumentError, match="concatenate parts in pairs"):
        Dataset.range(0).apply(lambda ds: [ds := ds.concatenate(part) for part in parts][-1])
    while len(parts) > 1:
        parts = [first.concatenate(second) for first, second in zip(parts[::2], parts[1::2], strict=True)]
    assert parts[0]._op.chain_length == 10, "what stands side by side is not counted"
    assert len(list(parts[0])) == 512
    deep = Dataset.range(3)
    for _ in range(200):
        deep = deep.interleave(lambda x: Dataset.from_tensors(x))
    with pytest.raises(RecursionError) as caught:
        list(deep)
    assert any("201 operations follow each other" in note for note in caught.value.__notes__)


# --- steps ------------------------------------------------------------------------------------------------------------

PAIR = flatten((0, 1))[1]


def test_what_cannot_be_cut() -> None:
    def cut(*batch: Any) -> object:
        structure = PAIR if len(batch) == 2 else LEAF
        return cut_batch(batch, num_replicas=2, rule="per_batch", step=0, structure=structure)

    lengths = np.arange(4), np.arange(6)
    leaves: list[Any] = [np.int64(3), b"text", "text", np.array(1.0)]
    cases: list[tuple[Callable[[], object], str]] = [
        (partial(cut, *lengths), r"equally many rows.*'0': 4, '1': 6.*rd\.Replicated.*collate"),
        (lambda: deal([lengths], PAIR), "equally many rows"),
        (lambda: cut(WholeLeaf(np.arange(4))), "beside those marked with rd.Replicated"),
        (lambda: deal([[np.arange(3), np.int64(7)], None], PAIR), "got a scalar '1'"),
        *((partial(cut, np.arange(3), leaf), r"'1'.*Call the `batch` method") for leaf in leaves),
    ]
    check_refused(call, cases)


def iterator(dataset: Dataset) -> DatasetIterator[Element]:
    return DatasetIterator(dataset._op, options=dataset.options(), seed=0, epoch=0, convert=element_views)


def two_steps(source: GlobalBatches) -> list[list[Any]]:
    return [[cut.columns[0].tolist() for cut in source.next_step()] for _ in range(2)]


def test_the_index_of_a_step_counts_errors_and_survives_a_state() -> None:
    def divide(x: Any) -> Any:
        if x == 0:
            raise ZeroDivisionError
        return x

    dataset = Dataset.range(6).map(divide).batch(2)
    source = GlobalBatches(iterator(dataset), 4, "balanced")
    with pytest.raises(ZeroDivisionError):
        source.next_step()
    resumed = GlobalBatches(iterator(dataset), 4, "balanced")
    resumed.load_state_dict(source.state_dict())
    assert resumed.step == 1
    assert two_steps(resumed) == two_steps(source) == [[[], [], [2], [3]], [[4], [5], [], []]]


def test_lists_of_tensors_that_are_left_are_cut_anew() -> None:
    lists = Dataset.range(6).map(lambda x: np.full(x, x)).ragged_batch(6)
    made, other = (WorkerBatches(iterator(lists), 1, pieces, "per_batch") for pieces in (3, 2))
    made.next_step()
    other.load_state_dict(made.state_dict())
    left = [other.next_step()[0] for _ in range(2)]
    assert [[len(array) for array in cut.columns[0].item().value] for cut in left] == [[2, 3], [4, 5]]


def test_states_that_are_none() -> None:
    made = WorkerBatches(iterator(Dataset.range(4).batch(2)), 1, 2, "per_batch")
    wrong: list[Any] = [[[3, 2]], [[1, 0]], [[1, 1 << 40]], [[-1, 2]], [[1]], 5, [["a", "b"]]]
    states = [{**made.state_dict(), "dealt": dealt} for dealt in wrong]
    check_refused(call, [(partial(made.load_state_dict, state), ".") for state in states])
