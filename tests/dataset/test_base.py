from __future__ import annotations

import pickle

import pytest

from raydist.dataset import Dataset
from raydist.dataset.base import graphs
from raydist.errors import InvalidArgumentError


def test_every_iter_is_an_epoch_counted_from_zero_and_not_pickled() -> None:
    dataset = Dataset.range(20).shuffle(20, seed=1)
    epochs = [[int(x) for x in dataset] for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    copied = pickle.loads(pickle.dumps(dataset))
    assert [[int(x) for x in copied] for _ in range(3)] == epochs


def test_a_dataset_does_not_change() -> None:
    dataset = Dataset.range(4)
    dataset.map(lambda x: x + 1).batch(2)
    assert [int(x) for x in dataset] == [0, 1, 2, 3]


def test_graphs_are_those_of_datasets_alone() -> None:
    assert len(graphs([Dataset.range(1), Dataset.range(2)], "zip")) == 2
    with pytest.raises(TypeError, match="choose takes datasets, got 3"):
        graphs([Dataset.range(1), 3], "choose")  # type: ignore[list-item]  # the point of this test
    with pytest.raises(InvalidArgumentError, match="choose needs at least one dataset"):
        graphs([], "choose")
