"""DataLoaders put together at random: data sets, samplers, batch samplers, collate functions, workers, generators."""

from __future__ import annotations

import json
import random
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

import raydist as rd
from raydist.core.values import PerReplica
from raydist.distributed_dataset import DistributedDataset, distribute
from raydist.options import InputOptions
from tests.actors.readers.fakes import fake_side

MadeLoader = tuple[DataLoader[Any], Callable[[int], None]]
"""A loader, and what a program does with it before every epoch, given the epoch's number."""

Pair = namedtuple("Pair", "x y")


def seed_process(seed: int) -> None:
    """Seed the generators of the process, as programs do."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


class Samples(Dataset[Any]):
    """`make` of every number."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self.count = count
        self.make = make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        return self.make(int(index))


class Stream(IterableDataset[Any]):
    def __init__(self, count: int, sharded: bool) -> None:
        self.count = count
        self.sharded = sharded

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None and self.sharded else (0, 1)
        return iter([_pair(number) for number in range(first, self.count, step)])


class SizedOrder:
    """A Python sampler: `order(n)` in every epoch."""

    def __init__(self, count: int, order: Callable[[Any, int], list[int]], generator: Any) -> None:
        self.count = count
        self.order = order
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.generator, self.count))

    def __len__(self) -> int:
        return self.count


class Counting:
    """A sampler that counts its epochs, and keeps the order that it shuffles."""

    def __init__(self, count: int) -> None:
        self.epoch = 0
        self.indices = list(range(count))

    def __iter__(self) -> Iterator[int]:
        random.Random(self.epoch).shuffle(self.indices)
        self.epoch += 1
        yield from self.indices

    def __len__(self) -> int:
        return len(self.indices)


class WithEpoch(Counting):
    """A sampler that is told the epoch by its program."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(self.indices, len(self.indices)))


class Unsized:
    """A sampler without a length, which draws as it goes."""

    def __init__(self, count: int, generator: torch.Generator | None) -> None:
        self.count = count
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.count):
            yield int(torch.randint(self.count, (), generator=self.generator))


class Buckets:
    """A batch sampler of neighbours in length, in random order."""

    def __init__(self, count: int, size: int, generator: Any) -> None:
        self.batches = [list(range(first, min(first + size, count))) for first in range(0, count, size)]
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        order = (np.random if self.generator is None else self.generator).permutation(len(self.batches))
        for number in order:
            yield self.batches[int(number)]

    def __len__(self) -> int:
        return len(self.batches)


def _pair(number: int) -> Any:
    return torch.full((2,), float(number)), number


def _pad(samples: list[Any]) -> dict[str, Any]:
    longest = max(len(tokens) for tokens, _ in samples)
    rows = [torch.nn.functional.pad(tokens, (0, longest - len(tokens))) for tokens, _ in samples]
    return {"tokens": torch.stack(rows), "labels": torch.tensor([-100 if y is None else y for _, y in samples])}


def _dataset(rng: random.Random, count: int) -> tuple[Any, Any]:
    """A data set, and a collate function (None: torch's)."""
    kinds: list[Callable[[], tuple[Any, Any]]] = [
        lambda: (TensorDataset(torch.arange(2.0 * count).reshape(count, 2), torch.arange(count)), None),
        lambda: (Samples(count, _pair), None),
        lambda: (Samples(count, lambda i: [np.array([i, -i], np.float32), float(i)]), None),
        lambda: (Samples(count, lambda i: {"x": torch.tensor([i]), "name": f"n{i}", "at": (i, i % 2 == 0)}), None),
        lambda: (Samples(count, lambda i: Pair(i, np.int32(i))), None),
        lambda: (Samples(count, lambda i: f"text {i}"), None),
        lambda: (Samples(count, lambda i: (torch.arange(1 + i % 5), None if i % 3 else i)), _pad),
        lambda: (Samples(count, _pair), lambda samples: default_collate(samples[::-1])),
        lambda: (Subset(Samples(2 * count, _pair), range(0, 2 * count, 2)), None),
        lambda: ([(i, i * 0.5) for i in range(count)], None),
    ]
    return rng.choice(kinds)()


def _torch(rng: random.Random) -> torch.Generator | None:
    return torch.Generator().manual_seed(rng.randrange(1000)) if rng.random() < 0.7 else None


def _sampler(rng: random.Random, dataset: Any) -> Any:
    count, seed = len(dataset), rng.randrange(1000)
    kinds: list[Callable[[], Any]] = [
        lambda: SequentialSampler(dataset),
        lambda: RandomSampler(dataset, generator=_torch(rng)),
        lambda: RandomSampler(dataset, num_samples=rng.randint(1, 2 * count), generator=_torch(rng)),
        lambda: RandomSampler(dataset, True, rng.randint(1, 80), generator=_torch(rng)),
        lambda: SubsetRandomSampler(range(count // 2), generator=_torch(rng)),
        lambda: WeightedRandomSampler(range(1, count + 1), rng.randint(1, 40), True, generator=_torch(rng)),
        lambda: WeightedRandomSampler(range(1, count + 1), rng.randint(1, count), False, generator=_torch(rng)),
        lambda: SizedOrder(count, lambda g, n: g.sample(range(n), n), random.Random(seed)),
        lambda: SizedOrder(count, lambda g, n: g.permutation(n), np.random.default_rng(seed)),
        lambda: SizedOrder(count, lambda g, n: random.sample(range(n), n), None),
        lambda: SizedOrder(count, lambda g, n: torch.randperm(n).tolist(), None),
        lambda: Counting(count),
        lambda: WithEpoch(count),
        lambda: Unsized(count, _torch(rng)),
    ]
    return rng.choice(kinds)()


def _batch_sampler(rng: random.Random, dataset: Any) -> Any:
    count, size = len(dataset), rng.randint(1, 6)
    kinds: list[Callable[[], Any]] = [
        lambda: BatchSampler(_sampler(rng, dataset), size, rng.random() < 0.5),
        lambda: Buckets(count, size, np.random.default_rng(rng.randrange(100))),
        lambda: Buckets(count, size, np.random.RandomState(rng.randrange(100))),
        lambda: Buckets(count, size, None),
        lambda: [[index, count - 1 - index] for index in range(count)],
    ]
    return rng.choice(kinds)()


def make_loader(seed: int) -> MadeLoader:
    """The loader of a seed: equal ones for equal seeds."""
    rng = random.Random(seed)
    count, workers, generator = rng.randint(1, 40), rng.choice([0, 0, 1, 2]), _torch(rng)
    kind = rng.choice(["plain", "sampler", "sampler", "batch_sampler", "batch_sampler", "whole", "stream"])
    if kind == "stream":
        stream = Stream(count, rng.random() < 0.5)
        size, drop = rng.choice([1, 3, 5]), rng.random() < 0.5
        return DataLoader(stream, size, drop_last=drop, num_workers=workers, generator=generator), _nothing
    if kind == "whole":  # every sample is a batch
        whole = Samples(count, lambda i: (torch.full((1 + i % 4, 2), i), [f"{i}"] * (1 + i % 4)))
        return DataLoader(whole, batch_size=None, sampler=_sampler(rng, whole), num_workers=workers), _nothing
    dataset, collate = _dataset(rng, count)
    given: dict[str, Any] = {"collate_fn": collate, "num_workers": workers, "generator": generator}
    if kind == "batch_sampler":
        return DataLoader(dataset, batch_sampler=_batch_sampler(rng, dataset), **given), _nothing
    given |= {"batch_size": rng.randint(1, 7), "drop_last": rng.random() < 0.4}
    if kind == "plain":
        return DataLoader(dataset, shuffle=rng.random() < 0.7, **given), _nothing
    sampler = _sampler(rng, dataset)
    return DataLoader(dataset, sampler=sampler, **given), getattr(sampler, "set_epoch", _nothing)


def _nothing(epoch: int) -> None:
    """Most programs do nothing before an epoch."""


EPOCHS = 3


@contextmanager
def on_replicas(loader: Any, num_replicas: int) -> Iterator[DistributedDataset]:
    """A loader on so many replicas, without Ray."""
    with fake_side(num_replicas) as side:
        yield distribute(rd.Dataset.from_torch(loader), side, InputOptions(num_input_workers=0))


def _leaves(batch: Any) -> list[Any]:
    """The leaves of a batch, of torch's or of replicas."""
    if isinstance(batch, PerReplica):
        return _leaves(
            torch.cat(batch.values) if isinstance(batch.values[0], torch.Tensor) else np.concatenate(batch.values)
        )
    if isinstance(batch, torch.Tensor):
        return [(str(batch.dtype), batch.tolist())]
    if isinstance(batch, Mapping):
        return [leaf for key in sorted(batch) for leaf in _leaves(batch[key])]
    if all(isinstance(value, str) for value in batch):
        return [list(batch)]
    return [leaf for part in batch for leaf in _leaves(part)]


def _check(seed: int) -> int:
    """Compare the loader of a seed with plain torch; returns the number of batches compared."""
    rng = random.Random(-seed)
    loader, before = _begin(seed)
    expected = [[_leaves(batch) for batch in epoch] for epoch in _epochs(loader, before)]
    after = torch.rand(()), np.random.rand(), random.random()

    loader, before = _begin(seed)
    stop = rng.randrange(EPOCHS)
    saved_at = rng.randint(1, max(1, len(expected[stop])))
    saved: Any = None
    with on_replicas(loader, rng.randint(1, 3)) as dataset:
        for epoch in range(EPOCHS):
            before(epoch)
            made = []
            for batch in dataset:
                made.append(_leaves(batch))
                if (epoch, len(made)) == (stop, saved_at):
                    own = torch.get_rng_state(), np.random.get_state(), random.getstate()
                    saved = json.dumps(dataset.state_dict()), own
            assert made == expected[epoch], f"loader {seed}, epoch {epoch}"
    if not isinstance(getattr(loader.sampler, "sampler", loader.sampler), Unsized):  # which goes on with the next epoch
        assert after == (torch.rand(()), np.random.rand(), random.random()), f"loader {seed} left other generators"
    if saved is None:
        return EPOCHS * len(expected[0])

    state, own = saved
    _check_resumed(seed, state, own, rng.randint(1, 3), stop, expected[stop][saved_at:], expected)
    return sum(map(len, expected))


def _begin(seed: int) -> MadeLoader:
    seed_process(seed)
    return make_loader(seed)


def _epochs(loader: Any, before: Callable[[int], None]) -> Iterator[list[Any]]:
    for epoch in range(EPOCHS):
        before(epoch)
        yield list(loader)


def _check_resumed(
    seed: int, state: str, own: Any, num_replicas: int, stop: int, rest: list[Any], expected: list[Any]
) -> None:
    """Load the state in a new program: the rest of epoch `stop` and the epochs after it are as expected."""
    position = json.loads(state)["position"]["at"]
    generators = _find(position, "generators"), _find(position, "globals")
    assert len(state) <= (10 + 8 * sum(map(len, generators))) * 1024
    loader, before = _begin(seed)
    with on_replicas(loader, num_replicas) as resumed:
        torch.set_rng_state(own[0])  # a Checkpoint does so
        np.random.set_state(own[1])
        random.setstate(own[2])
        before(stop)
        resumed.load_state_dict(json.loads(state))
        assert [*map(_leaves, resumed)] == rest, (
            f"loader {seed}, resumed in epoch {stop}, {len(rest)} batches from its end"
        )
        for epoch in range(stop + 1, EPOCHS):
            before(epoch)
            assert [*map(_leaves, resumed)] == expected[epoch], (
                f"loader {seed}, epoch {epoch} after one that was resumed"
            )


def _find(state: Any, key: str) -> Any:
    if isinstance(state, dict):
        found = [state[key]] if key in state else [_find(part, key) for part in state.values()]
        return next((part for part in found if part is not None), None)
    return None


@pytest.mark.parametrize("first", range(4))
def test_batches_are_those_of_torch_on_any_number_of_replicas_and_resumed_anywhere(first: int) -> None:
    for seed in range(first, 24, 4):
        _check(seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_three_hundred_random_loaders() -> None:
    assert sum(_check(seed) for seed in range(300)) > 3_000, "batches were compared"
