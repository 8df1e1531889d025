"""`Dataset.from_torch` of a DataLoader: the order of its samples, and the batches that its `collate_fn` makes.

The program's own loader determines the order. When an epoch begins, the sampler is copied; then the sampler and the
loader's generator advance as by a whole iteration of the loader. The process that makes the batches iterates over
the copy. A state contains the generators as they were when the epoch began, and the number of batches.
"""

from __future__ import annotations

import itertools
import os
import pickle
import platform
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.dataset.collated import element_of
from raydist.dataset.generator_states import (
    GlobalStates,
    PickledCopy,
    generator_at,
    pickled_copy,
    set_generators,
    state_text,
)
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.ops.map import MapOp
from raydist.pipelines.sources.torch_datasets import LoaderOp, LoaderOrder

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw only from their `generator`, or from torch's global one."""

_MOST_LISTS = 1 << 20

_END = object()


def loader_op(loader: DataLoader[Any]) -> DatasetOp:
    """Return the op for the batches of `loader`.

    Raises:
        InvalidArgumentError: The loader has a sampler that skips the samples of other replicas.
    """
    _require_whole(loader)
    label = f"{type(loader).__name__}({type(loader.dataset).__name__})"
    order, leaf = ProgramsOrder(loader, is_iterated=_is_iterated(loader)), _known_leaf(_index_sampler(loader))
    is_counted = leaf is not None and not isinstance(loader.dataset, IterableDataset)
    source = LoaderOp(order, len(_index_sampler(loader)) if is_counted else UNKNOWN_CARDINALITY, label)
    if order.is_iterated:
        return MapOp(source, pickle.loads, 1)
    return MapOp(source, BatchReader(loader), max(1, loader.num_workers))


def _is_iterated(loader: DataLoader[Any]) -> bool:
    """Return True if the loader's own iterator is needed: an iterable-style dataset, or a custom iterator."""
    kinds = type(loader).__mro__
    own = any("iter" in name for kind in kinds[: kinds.index(DataLoader)] for name in vars(kind))
    return own or isinstance(loader.dataset, IterableDataset)


def _index_sampler(loader: DataLoader[Any]) -> Any:
    if isinstance(loader.dataset, IterableDataset):
        return SequentialSampler(())  # torch's sampler for these never ends
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _require_whole(loader: DataLoader[Any]) -> None:
    for sampler in (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise InvalidArgumentError(
                "A DataLoader must go through all samples, as the strategy splits every batch over the replicas, got a "
                f"DistributedSampler (rank {sampler.rank} of {sampler.num_replicas}), which leaves out those of other "
                f"ranks. Leave out sampler=, write shuffle={sampler.shuffle} instead, and give the global batch size."
            )


def _known_leaf(sampler: Any) -> Any:
    """Return the sampler of single indices within `sampler` if both are torch classes; otherwise None."""
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return sampler if type(sampler) in (SequentialSampler, *_RANDOM) else None


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def _draw(generator: torch.Generator | None) -> int:
    """Draw a seed in the way of a DataLoader and a RandomSampler."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _begun_lists(sampler: Any, generator: torch.Generator | None, *, twice: bool) -> tuple[Iterator[Any], int]:
    """Return the index lists of a sampler, and the loader's seed for the epoch, as a loader's iterator gets them.

    Args:
        sampler: A custom sampler, which may draw when `iter` is called.
        generator: Generator of the loader.
        twice: Call `iter` a second time, as a loader with workers does.
    """
    lists, seed = iter(sampler), _draw(generator)
    return (iter(sampler) if twice else lists), seed


@final
@dataclass(frozen=True, eq=False)
class _EpochStart:
    """A sampler and a loader's generator at the beginning of an epoch.

    Attributes:
        copy: Copy of the pair (sampler, generator), or of the whole loader if that is iterated.
        globals: States of the process's global generators that the sampler draws from.
        num_workers: Number of workers of the loader.
        home: Process of the program.
    """

    copy: PickledCopy
    globals: dict[str, str]
    num_workers: int
    home: tuple[str, int]

    def state(self) -> dict[str, Any]:
        """Return the part of an iterator's state that describes the beginning of the epoch."""
        return {"generators": list(self.copy.generators), "globals": self.globals}

    def at(self, state: dict[str, Any]) -> _EpochStart:
        """Return the same sampler with the generators of a state."""
        saved = GlobalStates(state["globals"]).texts()
        return replace(self, copy=self.copy.with_generators(state["generators"]), globals=saved)


@final
class ProgramsOrder(LoaderOrder):
    """The order of the program's loader.

    Args:
        loader: The loader.
        is_iterated: Batches come from the loader's own iterator.
    """

    def __init__(self, loader: DataLoader[Any], *, is_iterated: bool) -> None:
        self.is_iterated = is_iterated
        self._dataset = loader.dataset
        self._sampler, self._generator = _index_sampler(loader), loader.generator
        self._copied = loader if is_iterated else (self._sampler, self._generator)
        self._num_workers = loader.num_workers
        self._next_epoch = 0
        self._unfinished: Iterator[Any] = iter(())
        self._home = _this_process()

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> LoaderOrder:
        if epoch > self._next_epoch:  # the program resumes where another process stopped
            with GlobalStates().in_place():
                for _ in range(epoch - self._next_epoch):
                    self._finish()
                    self._pass_over()
        self._next_epoch = max(self._next_epoch, epoch + 1)
        if saved is None:
            return self._begun(epoch, None)
        with GlobalStates().in_place():  # the epoch drew from the process's generators when it began
            return self._begun(epoch, saved.get("generators", ()))

    def _begun(self, epoch: int, generators: Sequence[str] | None) -> LoaderOrder:
        self._finish()
        if generators is not None:
            set_generators(self._copied, self._dataset, generators)
        begin = self._begin()
        drawn_from = self._pass_over()
        return CopiedOrder(self._dataset, begin if drawn_from is None else replace(begin, globals=drawn_from), epoch)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unfinished": iter(())}

    def open(self, epoch: tuple[int, ...], state: dict[str, Any] | None) -> tuple[dict[str, Any], Callable[..., Any]]:
        return CopiedOrder(self._dataset, self._begin(), 0).open(epoch, state)

    def _begin(self) -> _EpochStart:
        leaf = _known_leaf(self._sampler)
        begin = _EpochStart(pickled_copy(self._copied, self._dataset), {}, self._num_workers, self._home)
        if leaf is None:
            return replace(begin, globals=GlobalStates().texts())
        if self._generator is None or getattr(leaf, "generator", self._generator) is None:
            return replace(begin, globals={"torch": GlobalStates().texts()["torch"]})
        return begin

    def _pass_over(self) -> dict[str, str] | None:
        """Advance the generators as an iteration would.

        Returns:
            For a custom sampler: the previous states of the process's generators that the sampler drew from. None if
            these generators are known in advance.
        """
        leaf = _known_leaf(self._sampler)
        if leaf is not None:
            lists = iter(self._sampler)
            _draw(self._generator)
            if type(leaf) is RandomSampler and leaf.generator is None:
                _draw(None)
            elif type(leaf) in _RANDOM:
                deque(lists, maxlen=0)
            return None
        before, length = GlobalStates(), _length(self._sampler)
        lists, _ = _begun_lists(self._sampler, self._generator, twice=self._num_workers > 0)
        deque(itertools.islice(lists, 1 if length is None else length + 1), maxlen=0)
        self._unfinished = lists
        return None if length is None else before.only_changed(GlobalStates())

    def _finish(self) -> None:
        """Skip the rest of a sampler without a length, which may be endless."""
        deque(itertools.islice(self._unfinished, _MOST_LISTS), maxlen=0)


@final
class CopiedOrder(LoaderOrder):
    """The order of one epoch of a dataset, including the passes of a `repeat` within that epoch."""

    def __init__(self, dataset: Any, first: _EpochStart, epoch: int) -> None:
        self._dataset = dataset
        self._first = first
        self._epoch = epoch
        self._last: tuple[tuple[int, ...], _EpochStart] | None = None

    def begin(self, epoch: int, saved: dict[str, Any] | None) -> LoaderOrder:
        return self

    def open(self, epoch: tuple[int, ...], state: dict[str, Any] | None) -> tuple[dict[str, Any], Callable[..., Any]]:
        begin = self._begin_of(epoch)
        if state is not None:
            begin = begin.at(state)
        self._last = epoch, begin
        return begin.state(), partial(_Pass, begin, self._dataset)

    def _begin_of(self, epoch: tuple[int, ...]) -> _EpochStart:
        if self._last is not None:
            last, begin = self._last
            return begin if last == epoch else _Pass(begin, self._dataset).end()
        begin = self._first
        for _ in range(epoch[0] - self._epoch + sum(epoch[1:])):
            begin = _Pass(begin, self._dataset).end()
        return begin


@final
class _Pass:
    """One iteration over a copied sampler, or over a copied loader.

    Torch's own samplers without a generator draw from a copy of the process's generator. Other samplers may draw from
    the process's generators at any time: the saved states are installed while such a sampler runs, which is at the
    beginning of the epoch if the sampler has a length.
    """

    def __init__(self, begin: _EpochStart, dataset: Any) -> None:
        self._dataset = dataset
        self._begin = begin
        self._made = begin.copy.make(dataset)
        self._loader = self._made if isinstance(self._made, DataLoader) else None
        loader = self._loader
        self._sampler, self._generator = self._made if loader is None else (_index_sampler(loader), loader.generator)
        self._leaf = _known_leaf(self._sampler)
        is_own = self._leaf is not None and "torch" in begin.globals
        self._substitute: torch.Generator | None = generator_at(begin.globals["torch"]) if is_own else None
        self._globals = GlobalStates({} if is_own else begin.globals)
        self._seed = 0
        self._lent = False

    def __iter__(self) -> Iterator[bytes]:
        if self._loader is not None:
            yield from map(pickle.dumps, self._batches(self._loader))
            return
        for number, indices in enumerate(self._lists()):
            yield pickle.dumps(((self._seed + number) % (1 << 63), indices))

    def end(self) -> _EpochStart:
        """Return the sampler and its generators after this iteration."""
        deque(self._lists(), maxlen=0)
        if self._lent:
            self._leaf.generator = None
        copied = pickled_copy(self._made, self._dataset)
        own = state_text(self._substitute)
        return replace(self._begin, copy=copied, globals=self._globals.texts() if own is None else {"torch": own})

    def _lists(self) -> Iterator[Any]:
        return self._custom_lists() if self._leaf is None else self._known_lists(self._leaf)

    def _known_lists(self, leaf: Any) -> Iterator[Any]:
        self._seed = _draw(self._generator or self._substitute)
        self._lend(leaf, self._substitute)
        yield from self._sampler

    def _lend(self, leaf: Any, source: torch.Generator | None) -> None:
        """Make a sampler without a generator draw from `source` what it would draw from the process's generator."""
        if type(leaf) in _RANDOM and leaf.generator is None:
            self._lent = True
            seeds = type(leaf) is RandomSampler
            leaf.generator = torch.Generator().manual_seed(_draw(source)) if seeds else source

    def _custom_lists(self) -> Iterator[Any]:
        length = _length(self._sampler)
        with self._globals.in_place():
            lists, self._seed = _begun_lists(self._sampler, self._generator, twice=self._begin.num_workers > 0)
            first = list(itertools.islice(lists, 0 if length is None else length + 1))
        yield from first
        yield from self._pulled(lists)

    def _batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        ahead = generator_at(state_text(self._generator or self._substitute or torch.default_generator) or "")
        seed = _draw(ahead)  # as the loader itself is about to draw it
        if self._begin.home != _this_process():
            _seed_globals(seed)
        if self._substitute is not None and self._generator is None:
            loader.generator = self._substitute
        self._lend(
            self._leaf, ahead if self._generator is None and type(self._leaf) is RandomSampler else self._substitute
        )
        with self._globals.in_place():
            batches = iter(loader)
        return (element_of(batch, None) for batch in self._pulled(batches))

    def _pulled(self, values: Iterator[Any]) -> Iterator[Any]:
        """Yield values, each produced with the saved states of the process's generators installed."""
        while True:
            with self._globals.in_place():
                value = next(values, _END)
            if value is _END:
                return
            yield value


@final
class BatchReader:
    """A function that reads the samples of a list of indices and makes a batch of them.

    One thread of a process reads at a time, because datasets for torch's worker processes need not be thread-safe. In a
    process other than the program's own, every batch has a random seed, so that random numbers of a dataset do not
    depend on the process that reads the batch.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._dataset = loader.dataset
        self._collate_fn = loader.collate_fn
        self._is_batched = loader.batch_sampler is not None
        self._init_fn = loader.worker_init_fn if loader.num_workers else None
        self._num_workers = loader.num_workers
        self._home = _this_process()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __call__(self, packed: bytes) -> Any:
        seed, indices = pickle.loads(packed)
        with self._lock:
            if self._home != _this_process():
                self._prepare(seed)
            return element_of(self._read(indices), len(indices) if self._is_batched else None)

    def _prepare(self, seed: int) -> None:
        if self._init_fn is not None:
            self._init_fn(os.getpid() % self._num_workers)
            self._init_fn = None
        _seed_globals(seed)

    def _read(self, indices: Any) -> Any:
        if not self._is_batched:
            return self._collate_fn(self._dataset[indices])
        dataset = self._dataset
        if type(dataset) is TensorDataset and self._collate_fn is default_collate:
            rows = torch.tensor(list(map(int, indices)), dtype=torch.int64)
            return [tensor[rows] for tensor in dataset.tensors]
        read_all = getattr(self._dataset, "__getitems__", None)
        samples = read_all(indices) if read_all else [self._dataset[index] for index in indices]
        return self._collate_fn(samples)


def _this_process() -> tuple[str, int]:
    return platform.node(), os.getpid()


def _seed_globals(seed: int) -> None:
    torch.default_generator.manual_seed(seed % (1 << 63))
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
