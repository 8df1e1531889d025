"""From element_views to steps, without threads and actors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.split import Cut
from raydist.pipelines.run.steps import DealtElements, Element, GlobalBatches, StepSource, element_views


def iterator(dataset: Dataset, seed: int = 0) -> DatasetIterator[Element]:
    return DatasetIterator(dataset._op, options=dataset.options(), seed=seed, epoch=0, convert=element_views)


def drain(source: StepSource) -> list[list[Any]]:
    steps = []
    while True:
        try:
            steps.append(lists(source.next_step()))
        except StopIteration:
            return steps


def lists(cuts: tuple[Cut, ...]) -> list[Any]:
    return [cut.columns[0].tolist() for cut in cuts]


def test_global_batches_are_cut() -> None:
    assert drain(GlobalBatches(iterator(Dataset.range(6).batch(4)), 2, "per_batch")) == [[[0, 1], [2, 3]], [[4], [5]]]


def test_nothing_is_copied_on_the_way() -> None:
    rows = np.arange(8.0).reshape(1, 8)
    source = GlobalBatches(iterator(Dataset.from_tensor_slices(rows)), 2, "per_batch")
    assert all(np.shares_memory(cut.columns[0], rows) for cut in source.next_step())


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
    assert drain(resumed) == drain(source) == [[[], [], [2], [3]], [[4], [5], [], []]]


def test_a_plain_iterators_state_fits_a_step_source() -> None:
    plain = Dataset.range(6).batch(2).as_numpy_iterator()
    next(plain)
    source = GlobalBatches(iterator(Dataset.range(6).batch(2)), 2, "per_batch")
    source.load_state_dict(plain.state_dict())
    assert drain(source) == [[[2], [3]], [[4], [5]]]


def test_elements_are_dealt_from_one_or_several_iterators() -> None:
    assert drain(DealtElements([iterator(Dataset.range(3))], 2)) == [[0, 1], [2, []]]
    several = [iterator(Dataset.range(1)), iterator(Dataset.range(5, 7))]
    assert drain(DealtElements(several, 2)) == [[0, 5], [[], 6]]


def test_structure_and_close() -> None:
    source = GlobalBatches(iterator(Dataset.from_tensor_slices({"x": [1, 2]}).batch(2)), 1, "per_batch")
    source.next_step()
    assert source.structure.paths() == ["x"]
    source.close()
    with pytest.raises(Exception, match="closed"):
        source.next_step()


def test_a_state_of_another_number_of_pipelines() -> None:
    two, three = (DealtElements([iterator(Dataset.range(8)) for _ in range(count)], count) for count in (2, 3))
    with pytest.raises(InvalidArgumentError, match="it is of 2, and there are 3 now"):
        three.load_state_dict(two.state_dict())
    with pytest.raises(InvalidArgumentError, match="the state must be a dict"):
        three.load_state_dict([])  # type: ignore[arg-type]  # a user's mistake
