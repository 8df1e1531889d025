from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, get_worker_info

import raydist as rd
from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.dataset.collated import element_of

NUMBERS: Any = list(range(10))


def shuffled(seed: int = 7, data: Any = NUMBERS, **given: Any) -> DataLoader[Any]:
    return DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(seed), **given)


def values(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


class Draws:
    """Samples with random numbers that a data set draws by itself."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()), np.random.rand(), FIRST_CALLS[0]


FIRST_CALLS = [0]


def first_call(worker: int) -> None:
    FIRST_CALLS[0] = 10 + worker


class Locked:
    """A data set that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


def test_passes_of_a_repeat_and_epochs_go_on_as_the_loaders() -> None:
    plain = shuffled()
    expected = [values(plain) for _ in range(3)]
    assert values(rd.Dataset.from_torch(shuffled()).repeat(3)) == sum(expected, [])
    dataset = rd.Dataset.from_torch(shuffled(num_workers=2))
    assert [values(dataset) for _ in range(3)] == expected
    assert (len(dataset), dataset.element_spec) == (3, rd.TensorSpec((None,), "int64"))


def test_looking_at_a_dataset_draws_nothing() -> None:
    torch.manual_seed(3)
    dataset = rd.Dataset.from_torch(DataLoader(NUMBERS, 4, shuffle=True))
    assert dataset.element_spec.dtype == "int64"
    assert dataset.explain()
    looked = values(dataset)
    torch.manual_seed(3)
    assert looked == values(DataLoader(NUMBERS, 4, shuffle=True))


def test_loaders_that_share_a_generator_draw_in_turn() -> None:
    def pair() -> list[DataLoader[Any]]:
        generator = torch.Generator().manual_seed(1)
        return [DataLoader(NUMBERS, 5, shuffle=True, generator=generator) for _ in range(2)]

    first, second = pair()
    expected = [(values(first), values(second)) for _ in range(2)]
    mine, other = map(rd.Dataset.from_torch, pair())
    assert [(values(mine), values(other)) for _ in range(2)] == expected


def test_a_changed_state_is_an_error_of_ours() -> None:
    iterator = iter(rd.Dataset.from_torch(shuffled()))
    next(iterator)
    text = json.dumps(iterator.state_dict())
    place = text.index("torch:") + 6
    for changed in (
        text[:place] + "AAAA" + text[place + 4 :],
        text.replace('"torch:', '"PCG64:'),
        text.replace("torch:", ""),
    ):
        resumed = iter(rd.Dataset.from_torch(shuffled()))
        resumed.load_state_dict(json.loads(changed))
        with pytest.raises(InvalidArgumentError, match="state"):
            next(resumed)


def test_a_part_of_the_samples_is_refused() -> None:
    def sampler(count: int) -> DistributedSampler[Any]:
        return DistributedSampler(NUMBERS, num_replicas=count, rank=0, seed=4)

    with pytest.raises(InvalidArgumentError, match=r"rank 0 of 2.*shuffle=True"):
        rd.Dataset.from_torch(DataLoader(NUMBERS, 4, sampler=sampler(2)))
    plain, mine = (DataLoader(NUMBERS, 4, sampler=sampler(1)) for _ in range(2))
    dataset = rd.Dataset.from_torch(mine)
    for epoch in range(2):
        plain.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # of a DistributedSampler
        mine.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # the same
        assert values(dataset) == values(plain)
    with pytest.raises(InvalidArgumentError, match="output_signature belongs to a torch Dataset"):
        rd.Dataset.from_torch(shuffled(), rd.TensorSpec((), "int64"))


def test_values_for_each_sample_are_no_columns() -> None:
    images = [torch.zeros(3, 2 + index, 5) for index in range(4)]
    with pytest.raises(SpecError, match=r"list of 4 values, one for each sample.*batch\(n, collate=fn\)"):
        element_of(images, 4)
    with pytest.raises(SpecError, match="one for each sample"):
        element_of((torch.zeros(2), [{"boxes": torch.zeros(1, 4)}] * 2), 2)
    columns = element_of([torch.zeros(2, 3), ["a", "b"], {"y": [torch.zeros(2)]}], 2)
    assert isinstance(columns, tuple)
    assert columns[1] == ["a", "b"]
    assert isinstance(columns[2]["y"], tuple)


def test_a_loader_with_an_iterator_of_its_own_keeps_it() -> None:
    class Doubled(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (2 * batch for batch in super().__iter__())

    for seed in (None, 5):

        def loader(kind: type[DataLoader[Any]], seed: int | None = seed) -> DataLoader[Any]:
            torch.manual_seed(2)
            return kind(
                NUMBERS, 4, shuffle=True, generator=None if seed is None else torch.Generator().manual_seed(seed)
            )

        plain = loader(DataLoader)
        expected = [[[2 * x for x in batch] for batch in values(plain)] for _ in range(3)]
        dataset = rd.Dataset.from_torch(loader(Doubled))
        assert [values(dataset) for _ in range(3)] == expected


@pytest.mark.ray
def test_what_cannot_be_pickled_stays_in_one_process(two: rd.Strategy) -> None:
    locked: Any = Locked()
    assert values(rd.OneDeviceStrategy("cpu").distribute_dataset(DataLoader(locked, 2))) == [[0, 1], [2]]
    with pytest.raises(InvalidArgumentError, match="must be picklable"):
        iter(two.distribute_dataset(DataLoader(locked, 2)))


class Shards(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, 10, step))


def _epochs(strategy: rd.Strategy, view: Any, count: int = 2) -> list[Any]:
    """The rows of all replicas of each batch."""
    return [
        [sum((part.tolist() for part in strategy.local_results(batch)), []) for batch in view] for _ in range(count)
    ]


@pytest.mark.ray
def test_replicas_get_the_loaders_batches(two: rd.Strategy) -> None:
    def loaders() -> list[DataLoader[Any]]:
        rows: Any = torch.arange(20)
        with_replacement = RandomSampler(rows, replacement=True, num_samples=9)
        return [
            shuffled(),
            shuffled(data=rows, num_workers=2),
            DataLoader(rows, 4, sampler=with_replacement),
            DataLoader(Shards(), 3, num_workers=2),
        ]

    torch.manual_seed(5)
    expected = [[values(loader), values(loader)] for loader in loaders()]
    torch.manual_seed(5)
    assert [_epochs(two, two.distribute_dataset(loader)) for loader in loaders()] == expected


def test_a_state_goes_on_and_restores_the_generator_too() -> None:
    alone = rd.OneDeviceStrategy("cpu")
    view = alone.distribute_dataset(shuffled())
    iterator = iter(view)
    next(iterator)
    state = json.loads(json.dumps(view.state_dict()))
    expected = [values(iterator), values(view), values(view)]
    other = alone.distribute_dataset(shuffled(seed=8))
    other.load_state_dict(state)
    assert [values(other), values(other), values(other)] == expected


@pytest.mark.ray
def test_random_numbers_of_samples_do_not_depend_on_who_reads_them(two: rd.Strategy) -> None:
    def loader(workers: int) -> DataLoader[Any]:
        torch.manual_seed(4)
        data: Any = Draws()
        return DataLoader(data, 2, num_workers=workers, worker_init_fn=first_call if workers else None)

    view = two.distribute_dataset(loader(0))
    alone = [
        [torch.cat(leaf).tolist() for leaf in zip(*two.local_results(batch), strict=True)]
        for _ in "ab"
        for batch in view
    ]
    dataset = rd.Dataset.from_torch(loader(2)).with_options(rd.Options(num_input_workers=1))
    apart = [[leaf.tolist() for leaf in batch] for _ in "ab" for batch in dataset]
    assert [leaves[:3] for leaves in alone] == [leaves[:3] for leaves in apart]
    assert len({number for leaves in alone for number in leaves[1]}) == 2 * 8
    assert all(leaves[3] == [0, 0] for leaves in alone)
    assert all(set(leaves[3]) <= {10, 11} for leaves in apart)
