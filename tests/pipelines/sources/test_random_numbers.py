from __future__ import annotations

from raydist.dataset import Dataset
from raydist.values import INFINITE_CARDINALITY


def epochs(dataset: Dataset) -> list[list[int]]:
    first = dataset.take(5)
    return [[int(x) for x in first] for _ in range(2)]


def test_one_sequence_in_every_epoch_unless_asked_otherwise() -> None:
    one, two = epochs(Dataset.random(seed=3))
    assert one == two
    one, two = epochs(Dataset.random())
    assert one == two
    one, two = epochs(Dataset.random(seed=3, rerandomize_each_iteration=True))
    assert one != two


def test_a_seed_names_the_sequence() -> None:
    assert epochs(Dataset.random(seed=3)) == epochs(Dataset.random(seed=3))
    assert epochs(Dataset.random(seed=3)) != epochs(Dataset.random(seed=4))


def test_numbers_have_32_bits() -> None:
    (batch,) = Dataset.random(seed=1).batch(10_000).take(1)
    assert 0 <= int(batch.min()) < 1 << 22
    assert (1 << 32) - (1 << 22) < int(batch.max()) < 1 << 32
    assert Dataset.random().cardinality() == INFINITE_CARDINALITY
