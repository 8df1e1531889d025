from __future__ import annotations

import pytest

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.dataset import Dataset


@pytest.mark.parametrize("method", ["shuffle", "repeat", "take", "skip", "enumerate", "assert_cardinality"])
def test_counts_are_whole_numbers(method: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a whole number, got 2.5"):
        getattr(Dataset.range(4), method)(2.5)


def test_a_global_shuffle_needs_elements_that_can_be_read_by_index() -> None:
    with pytest.raises(FailedPreconditionError, match="read by their index, got filter"):
        Dataset.range(4).filter(lambda x: True).global_shuffle()


def test_global_shuffle_of_a_map_style_torch_dataset() -> None:
    class Squares:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> tuple[int, str]:
            return index * index, str(index)

    dataset = Dataset.from_torch(Squares()).global_shuffle(seed=3)
    assert (dataset.cardinality(), dataset.element_spec) == (100, Dataset.from_torch(Squares()).element_spec)
    first, second = ([(int(x), text) for x, text in dataset] for _ in range(2))
    expected = [(index * index, str(index)) for index in range(100)]
    assert sorted(first) == sorted(second) == expected
    assert len({tuple(first), tuple(second), tuple(expected)}) == 3
    iterator = iter(dataset)
    whole = [next(iterator) for _ in range(40)]
    resumed = iter(Dataset.from_torch(Squares()).global_shuffle(seed=3))
    resumed.load_state_dict(iterator.state_dict())
    assert sorted((int(x), text) for x, text in [*whole, *resumed]) == expected
