from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import raydist as rd
from raydist.training.torch_loader import loader_batches


class Squares(Dataset[Any]):
    """Pairs, as a list: torch makes a batch of each field."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> list[Any]:
        return [torch.tensor([float(index)]), index * index]


class Countdown(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.tensor([3.0]), 3), (torch.tensor([2.0]), 2), (torch.tensor([1.0]), 1)])


def batches_of(data: Any) -> list[list[Any]]:
    return [[x.tolist(), y.tolist()] for x, y in data]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Squares(), batch_size=4),
        DataLoader(Squares(), batch_size=4, drop_last=True, num_workers=2),
        DataLoader(Countdown(), batch_size=2),
        DataLoader(TensorDataset(torch.arange(6.0)[:, None], torch.arange(6)), batch_size=4),
        DataLoader([(torch.ones(2), 1), (torch.zeros(2), 0)]),  # type: ignore[arg-type]  # a list is a dataset to torch
        DataLoader([(torch.ones(2), torch.ones(2)), (torch.zeros(3), torch.ones(3))], batch_size=None),  # type: ignore[arg-type]  # as above
    ],
)
def test_batches_are_the_loaders(loader: DataLoader[Any]) -> None:
    assert batches_of(loader_batches(loader)) == batches_of(loader)


@pytest.mark.parametrize("dataset", [Squares(), TensorDataset(torch.arange(10.0)[:, None], torch.arange(10) ** 2)])
def test_a_shuffle_is_as_random_and_follows_the_loaders_generator(dataset: Any) -> None:
    def epochs(seed: int) -> list[Any]:
        loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed))
        data = loader_batches(loader)
        return [batches_of(data), batches_of(data)]

    first, second = epochs(1)
    assert first != second
    assert epochs(1) == [first, second]
    assert epochs(2)[0] != first
    for epoch in (first, second):
        rows = sorted((x[0], y) for xs, ys in epoch for x, y in zip(xs, ys, strict=True))
        assert rows == [(float(i), i * i) for i in range(10)]


def test_a_subset_is_the_subset() -> None:
    loader = DataLoader(Squares(), batch_size=2, sampler=SubsetRandomSampler([1, 5, 7]))
    assert sorted(y for _, ys in batches_of(loader_batches(loader)) for y in ys) == [1, 25, 49]


class Twice(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([*super().__iter__()] * 2)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            DataLoader(Squares(), collate_fn=list),
            r"a collate_fn of its own\. Write rd.Dataset.from_torch\(Squares\(...\)\)",
        ),
        (
            DataLoader(Squares(), batch_sampler=BatchSampler(SequentialSampler(Squares()), 2, False)),
            "a batch_sampler of its own.*bucket_by_sequence_length",
        ),
        (DataLoader(Squares(), sampler=WeightedRandomSampler([1.0] * 10, 10)), "has a WeightedRandomSampler"),
        (DataLoader(Squares(), sampler=RandomSampler(Squares(), num_samples=3)), "has a RandomSampler"),
        (DataLoader(Squares(), sampler=RandomSampler(Squares(), replacement=True)), "has a RandomSampler"),
        (
            DataLoader(Squares(), sampler=DistributedSampler(Squares(), num_replicas=2, rank=0)),
            "a DistributedSampler.*strategy splits each batch itself",
        ),
        (Twice(Squares()), "a Twice with an iterator of its own"),
    ],
)
def test_what_cannot_be_taken_over_says_what_to_write(loader: DataLoader[Any], message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        loader_batches(loader)
