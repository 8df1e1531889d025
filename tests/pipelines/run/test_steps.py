"""Elements become steps of replicas: how global batches are cut, dealt and resumed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any

import numpy as np
import pytest

from raydist.core.nest import LEAF, flatten
from raydist.dataset import Dataset
from raydist.pipelines.elements.object_leaves import WholeLeaf
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.split import cut_batch, deal
from raydist.pipelines.run.steps import Element, GlobalBatches, WorkerBatches, element_views
from tests.refused import check_refused

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
