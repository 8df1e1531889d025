"""A worker's own batches, dealt piece by piece. Against the contract: `tests/distributed_dataset/test_sharding.py`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.split import SplitRule
from raydist.pipelines.run.steps import WorkerBatches, element_views
from tests.pipelines.run.test_steps import drain, lists


def source(dataset: Dataset, replicas: int, pieces: int, rule: SplitRule = "per_batch") -> WorkerBatches:
    iterator = DatasetIterator(dataset._op, options=dataset.options(), seed=0, epoch=0, convert=element_views)
    return WorkerBatches(iterator, replicas, pieces, rule)


def test_a_batch_lasts_for_as_many_steps_as_there_are_workers() -> None:
    assert drain(source(Dataset.range(6).batch(4), 1, 2)) == [[[0, 1]], [[2, 3]], [[4]], [[5]]]
    assert drain(source(Dataset.range(7).batch(7), 2, 4)) == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    assert drain(source(Dataset.range(5).batch(4), 2, 2)) == [[[0, 1], [2, 3]], [[4], []]]


def test_balanced_goes_by_the_number_of_the_batch() -> None:
    assert drain(source(Dataset.range(6).batch(3), 1, 2, "balanced")) == [[[0, 1]], [[2]], [[3]], [[4, 5]]]


def test_pieces_without_rows_have_a_stand_in() -> None:
    made = source(Dataset.range(1).batch(4), 1, 3)
    steps = [made.next_step()[0] for _ in range(3)]
    assert [step.num_rows for step in steps] == [1, 0, 0]
    assert [step.padding and step.padding[0].tolist() for step in steps] == [None, [0], [0]]


def test_every_step_resumes() -> None:
    dataset = Dataset.range(20).map(lambda x: 1 // (int(x) - 9)).batch(7)
    made = source(dataset, 1, 3)
    states, seen = [made.state_dict()], []

    def next_of(steps: WorkerBatches) -> Any:
        try:
            return lists(steps.next_step())
        except ZeroDivisionError:
            return "error"
        except StopIteration:
            return None

    while (found := next_of(made)) is not None:
        seen.append(found)
        states.append(made.state_dict())
    assert seen.count("error") == 1
    for start, state in enumerate(states):
        resumed = source(dataset, 1, 3)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.state_dict() == state
        assert resumed.step == start
        rest = []
        while (found := next_of(resumed)) is not None:
            rest.append(found)
        assert rest == seen[start:]


def test_lists_of_tensors_that_are_left_are_cut_anew() -> None:
    lists = Dataset.range(6).map(lambda x: np.full(x, x)).ragged_batch(6)
    made = source(lists, 1, 3)
    made.next_step()
    other = source(lists, 1, 2)
    other.load_state_dict(made.state_dict())
    left = [other.next_step()[0] for _ in range(2)]
    assert [[len(array) for array in cut.columns[0].item().value] for cut in left] == [[2, 3], [4, 5]]


@pytest.mark.parametrize("dealt", [[[3, 2]], [[1, 0]], [[1, 1 << 40]], [[-1, 2]], [[1]], 5, [["a", "b"]]])
def test_states_that_are_none(dealt: Any) -> None:
    made = source(Dataset.range(4).batch(2), 1, 2)
    with pytest.raises(InvalidArgumentError):
        made.load_state_dict({**made.state_dict(), "dealt": dealt})
