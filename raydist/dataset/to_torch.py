"""`Dataset.to_torch`: a dataset as a `torch.utils.data.IterableDataset`, for a plain DataLoader. Imports torch.

The other direction, `Dataset.from_torch`, is in `torch_loader.py` (DataLoaders) and
`pipelines/sources/torch_datasets.py`.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import context, reduction
from typing import Any, Self, final

import torch
from torch.utils.data import IterableDataset, get_worker_info

from raydist.actors.workers.executors import open_executor
from raydist.core.errors import DeadlineExceededError
from raydist.dataset.running import Running
from raydist.pipelines.elements.convert import torch_rows
from raydist.pipelines.elements.seeds import draw_seed
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS
from raydist.pipelines.run.iterator import DatasetIterator

_NAMES = 1 << 62
_REMEMBERED = 64  # passes of workers that may be under way at a time
_RECORD = struct.Struct("<qq")
_LIMIT_S = 30.0
_NAP_S = 0.001


@final
class SharedEpochs:
    """Consecutive numbers of passes, from 0, shared with child processes that inherit the object. Other copies restart.

    The numbers are in a file without a name, which ends with the last of these processes.

    >>> epochs = SharedEpochs()
    >>> epochs.begin(), epochs.of_pass(7), epochs.of_pass(9), epochs.of_pass(7)
    (0, 1, 2, 1)
    """

    def __init__(self, file: int | None = None) -> None:
        if file is None:  # now, because a process that is forked later shares only open files
            file, path = tempfile.mkstemp(prefix="raydist-epochs-")
            os.unlink(path)
        self._file = file
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, file)

    def __reduce__(self) -> tuple[Any, ...]:
        if context.get_spawning_popen() is None:
            return SharedEpochs, ()
        return _of_descriptor, (reduction.DupFd(self._file),)

    def begin(self) -> int:
        """Return the number of a pass that begins."""
        with self._locked():
            return self._begun()

    def of_pass(self, name: int) -> int:
        """Return the number of the pass that all workers call `name`, which begins with the first call."""
        with self._locked():
            known = {found: number for number, found in map(self._read, range(1, 1 + _REMEMBERED)) if number >= 0}
            if name in known:
                return known[name]
            number = self._begun()
            self._write(1 + number % _REMEMBERED, number, name)
            return number

    def _begun(self) -> int:
        count = max(0, self._read(0)[1])
        self._write(0, 0, count + 1)
        return count

    def _read(self, record: int) -> tuple[int, int]:
        found = os.pread(self._file, _RECORD.size, record * _RECORD.size)
        number, name = _RECORD.unpack(found.ljust(_RECORD.size, b"\0"))
        return number - 1, name

    def _write(self, record: int, number: int, name: int) -> None:
        os.pwrite(self._file, _RECORD.pack(number + 1, name), record * _RECORD.size)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + _LIMIT_S
        with self._lock:  # the file lock is per process
            while not self._try_lock():
                if time.monotonic() > deadline:
                    raise DeadlineExceededError(
                        f"The epochs of a dataset under a DataLoader must be free within {_LIMIT_S:g} s, and another "
                        "process has held them longer. Is one of its workers stopped?"
                    )
                time.sleep(_NAP_S)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True


def _of_descriptor(descriptor: Any) -> SharedEpochs:
    return SharedEpochs(descriptor.detach())


@final
class TorchDataset(IterableDataset[Any]):
    """The elements of a dataset; with n workers of a DataLoader each returns every n-th element."""

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
        else:  # Torch's base seed is the same in all workers, and differs whenever they are started.
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
    """The elements `index`, `index + count`, ... with their errors."""

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
            except Exception:  # noqa: S112 - the error of an element that another worker returns
                continue
        self._to_pass = self._count - 1
        return next(self._elements)
