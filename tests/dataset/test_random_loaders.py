"""Batches of random DataLoaders are those of plain torch, on any number of replicas, and resumed anywhere."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd
from raydist.distributed_dataset import DistributedDataset
from raydist.distributed_dataset.layout import InputLayout, pickle_ops
from raydist.options import AutoShardPolicy, InputOptions
from raydist.pipelines.autotune.tuned_executor import local_executor
from raydist.pipelines.elements.small_floats import tensor_of_array
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.steps import GlobalBatches, element_views
from tests.dataset.random_loaders import Unsized, make_loader, seed_process

EPOCHS = 3


class Pieces:
    """The steps of one epoch, cut for replicas as an input pipeline cuts them, and put together again."""

    has_ended = False

    def __init__(self, op: Any, dataset: rd.Dataset, num_replicas: int, seed: int, epoch: int) -> None:
        batches = DatasetIterator(
            op, options=dataset.options(), seed=seed, epoch=epoch, convert=element_views, make_executor=local_executor
        )
        self._steps = GlobalBatches(batches, num_replicas, "per_batch")
        self.state_dict, self.load_state_dict, self.close = (
            self._steps.state_dict,
            self._steps.load_state_dict,
            self._steps.close,
        )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> list[Any]:
        try:
            cuts = self._steps.next_step()
        except StopIteration:
            self.has_ended = True
            raise
        assert all(len({len(leaf) for leaf in cut.columns}) == 1 for cut in cuts)
        return [_value(np.concatenate(leaf)) for leaf in zip(*(cut.columns for cut in cuts), strict=True)]


class CutDataset(DistributedDataset):
    """A loader on so many replicas, without Ray: the pipeline of an epoch is pickled, as if an actor ran it."""

    element_spec = None

    def __init__(self, loader: Any, num_replicas: int) -> None:
        dataset = rd.Dataset.from_torch(loader)
        super().__init__([dataset], InputOptions())
        self._num_replicas = num_replicas
        self._layout = InputLayout.of_batches(dataset._op, AutoShardPolicy.DATA, 1)

    def _open_epoch(self, epoch: int, position: Any = None) -> Any:
        ((op,),) = pickle.loads(pickle_ops(self._layout.at_epoch(epoch, position).of_workers))
        return Pieces(op, self._datasets[0], self._num_replicas, self._epochs.seed, epoch)


def _value(leaf: np.ndarray[Any, Any]) -> Any:
    if leaf.dtype == object:
        return leaf.tolist()
    tensor = tensor_of_array(leaf, torch.from_numpy)
    return str(tensor.dtype), tensor.tolist()


def _leaves(batch: Any) -> list[Any]:
    """The leaves of a batch of torch's, as `Pieces` gives them."""
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
    seed_process(seed)
    loader, before = make_loader(seed)
    expected = []
    for epoch in range(EPOCHS):
        before(epoch)
        expected.append([_leaves(batch) for batch in loader])
    after = torch.rand(()), np.random.rand(), random.random()

    seed_process(seed)
    loader, before = make_loader(seed)
    dataset = CutDataset(loader, rng.randint(1, 3))
    stop = rng.randrange(EPOCHS)
    saved_at = rng.randint(1, max(1, len(expected[stop])))
    saved: Any = None
    for epoch in range(EPOCHS):
        before(epoch)
        made = []
        for batch in dataset:
            made.append(batch)
            if (epoch, len(made)) == (stop, saved_at):
                own = torch.get_rng_state(), np.random.get_state(), random.getstate()
                saved = json.dumps(dataset.state_dict()), own
        assert made == expected[epoch], f"loader {seed}, epoch {epoch}"
    if not isinstance(getattr(loader.sampler, "sampler", loader.sampler), Unsized):  # which goes on with the next epoch
        assert after == (torch.rand(()), np.random.rand(), random.random()), f"loader {seed} left other generators"
    if saved is None:
        return EPOCHS * len(expected[0])

    state, own = saved
    begin = json.loads(state)["position"]["at"]
    generators = _find(begin, "generators"), _find(begin, "globals")
    assert len(state) <= (10 + 8 * sum(map(len, generators))) * 1024
    seed_process(seed)
    loader, before = make_loader(seed)
    resumed = CutDataset(loader, rng.randint(1, 3))
    torch.set_rng_state(own[0])  # a Checkpoint does so
    np.random.set_state(own[1])
    random.setstate(own[2])
    before(stop)
    resumed.load_state_dict(json.loads(state))
    rest = list(resumed)
    assert rest == expected[stop][saved_at:], f"loader {seed}, resumed in epoch {stop} behind batch {saved_at}"
    for epoch in range(stop + 1, EPOCHS):
        before(epoch)
        assert list(resumed) == expected[epoch], f"loader {seed}, epoch {epoch} after one that was resumed"
    return sum(map(len, expected)) + len(rest)


def _find(state: Any, key: str) -> Any:
    if isinstance(state, dict):
        found = [state[key]] if key in state else [_find(part, key) for part in state.values()]
        return next((part for part in found if part is not None), None)
    return None


@pytest.mark.parametrize("seed", range(24))
def test_batches_are_those_of_torch_on_any_number_of_replicas_and_resumed_anywhere(seed: int) -> None:
    _check(seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_three_hundred_random_loaders() -> None:
    compared = sum(_check(seed) for seed in range(300))
    print(f"300 loaders: {compared} batches compared")
