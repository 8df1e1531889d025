"""Datasets as `torch.utils.data.IterableDataset`, for loops around a DataLoader. Imports torch: see `to_torch`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Self, final

import torch
from torch.utils.data import IterableDataset, get_worker_info

from raydist.actors.workers.executors import open_executor
from raydist.dataset.running import Running
from raydist.dataset.shared_epochs import SharedEpochs
from raydist.pipelines.elements.convert import torch_rows
from raydist.pipelines.elements.seeds import draw_seed
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS
from raydist.pipelines.run.iterator import DatasetIterator

__all__ = ["TorchDataset"]

_NAMES = 1 << 62


@final
class TorchDataset(IterableDataset[Any]):
    """The elements of a dataset; of n workers of a DataLoader each gives every n-th one."""

    def __init__(self, dataset: Running) -> None:
        self._dataset = dataset
        seed = dataset.options().seed
        self._seed = draw_seed() if seed is None else seed
        self._epochs = SharedEpochs()
        self._passes_here = 0  # in this process

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if worker is None:
            epoch = self._epochs.begin()
        else:  # Torch's base seed is equal in all workers, and another one whenever they are started.
            epoch = self._epochs.of_pass((worker.seed - worker.id + self._passes_here) % _NAMES)
        self._passes_here += 1
        elements = DatasetIterator(
            self._dataset._op,
            options=self._dataset.options(),
            seed=self._seed,
            epoch=epoch,
            convert=partial(torch_rows, from_numpy=torch.from_numpy),
            make_executor=open_executor,
        )
        return _Share(elements, index, count)


@final
class _Share:
    """Elements `index`, `index + count`, ... and their errors."""

    def __init__(self, elements: Iterator[Any], index: int, count: int) -> None:
        self._elements = elements
        self._to_pass = index
        self._count = count

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while self._to_pass:
            self._to_pass -= 1
            try:
                next(self._elements)
            except (StopIteration, *MACHINERY_ERRORS):
                raise
            except Exception:  # noqa: S112 - the error of an element that another worker gives
                continue
        self._to_pass = self._count - 1
        return next(self._elements)
