"""A torch DataLoader as a dataset of global batches: its dataset, its batch size and its order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
    default_convert,
)

from raydist.dataset import Dataset
from raydist.errors import InvalidArgumentError
from raydist.options import Options

__all__ = ["drawn_seed", "loader_batches"]


def loader_batches(loader: DataLoader[Any]) -> Dataset:
    """What `loader` gives, read by raydist: one sample at a time, without the loader's workers.

    A random order is as random, but not the loader's own: its seed is drawn from the loader's generator.

    Raises:
        InvalidArgumentError: The loader does something of its own with samples or batches; says what to write.
    """
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise _refusal(loader, f"a {type(loader).__name__} with an iterator of its own", "")
    if loader.batch_size is None and loader.batch_sampler is not None:
        raise _refusal(loader, "a batch_sampler of its own", ".batch(n), or .bucket_by_sequence_length(...)")
    if loader.collate_fn is not (default_convert if loader.batch_size is None else default_collate):
        raise _refusal(
            loader, "a collate_fn of its own", ".batch(n).map(function of a whole batch), or .padded_batch(n)"
        )
    samples, seed = _samples(loader)
    if loader.batch_size is not None:
        samples = samples.batch(loader.batch_size, drop_remainder=loader.drop_last)
    # A seed of the options, not of the shuffle: that one goes on from a checkpoint.
    return samples if seed is None else samples.with_options(Options(seed=seed))


def drawn_seed(generator: torch.Generator | None = None) -> int:
    """A seed that follows `torch.manual_seed`, as a DataLoader draws one."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def _samples(loader: DataLoader[Any]) -> tuple[Dataset, int | None]:
    """The loader's samples in its order, and the seed of that."""
    if isinstance(loader.dataset, IterableDataset):
        return Dataset.from_torch(loader.dataset), None
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return _rows(loader.dataset, shuffle=False), None
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return _rows(loader.dataset, shuffle=True), drawn_seed(sampler.generator or loader.generator)
    if type(sampler) is SubsetRandomSampler:
        chosen = Dataset.from_tensor_slices(np.asarray(sampler.indices, dtype=np.int64))
        samples = chosen.global_shuffle().map(_Sample(loader.dataset), num_parallel_calls=1)
        return samples, drawn_seed(sampler.generator or loader.generator)
    raise _refusal(loader, f"a {type(sampler).__name__}", ".shuffle(n).batch(n): the strategy splits each batch itself")


def _rows(dataset: Any, *, shuffle: bool) -> Dataset:
    if type(dataset) is TensorDataset:
        rows = Dataset.from_tensor_slices(dataset.tensors)
        return rows.global_shuffle() if shuffle else rows
    order = Dataset.range(len(dataset))
    return (order.global_shuffle() if shuffle else order).map(_Sample(dataset), num_parallel_calls=1)


@final
@dataclass(frozen=True, eq=False)
class _Sample:
    """One sample by its index. A list of fields is what a loader takes it for, not one tensor."""

    dataset: Any

    def __call__(self, index: Any) -> Any:
        sample = self.dataset[int(index)]
        return tuple(sample) if isinstance(sample, list) else sample


def _refusal(loader: DataLoader[Any], what: str, then: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"A DataLoader's dataset, batch size and order are taken over, this one has {what}. Write "
        f"rd.Dataset.from_torch({type(loader.dataset).__name__}(...)){then} and give that."
    )
