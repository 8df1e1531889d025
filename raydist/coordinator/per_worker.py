"""Values and datasets of which each worker has its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

from raydist.actors.epochs.job import InputJob
from raydist.actors.epochs.link import DynamicShardingLink
from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.values import InputContext

if TYPE_CHECKING:
    from raydist.actors.epochs.link import PipelineLink

__all__ = ["DealtIteratorMaker", "IteratorMaker", "PerWorkerDataset", "PerWorkerIterator", "PerWorkerValue"]

_ONLY_SCHEDULED = (
    "is on the workers, each of which has its own: give it to coordinator.schedule in args, and use it in the function."
)


class PerWorkerValue:
    """A value of which each worker has its own. It is an argument of `schedule`, and nothing else.

    Args:
        name: The name by which workers know the value.
        keep: An object that lives as long as this one.
    """

    __nest_leaf__ = True

    def __init__(self, name: str, keep: Any = None) -> None:
        self.name = name
        self._keep = keep

    def __reduce__(self) -> NoReturn:
        raise InvalidArgumentError(f"A {type(self).__name__} {_ONLY_SCHEDULED} It was to be pickled.")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


@final
class PerWorkerIterator(PerWorkerValue):
    """An iterator on each worker over its dataset: an argument of `schedule`, in which the function calls `next`.

    When the data of a worker ends, `next` there raises StopIteration; if the function lets it escape, it becomes an
    OutOfRangeError, which `join` raises. When a worker dies, its replacement goes on with the batch after
    the last one of the closures that it had finished.

    Source: the iterators of tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset.
    """

    def __next__(self) -> NoReturn:
        raise FailedPreconditionError(f"A per-worker iterator {_ONLY_SCHEDULED}")

    def __iter__(self) -> NoReturn:
        raise FailedPreconditionError(f"A per-worker iterator {_ONLY_SCHEDULED}")


@final
class PerWorkerDataset:
    """A dataset on each worker. Each `iter()` of it begins a new epoch and returns the argument for `schedule`.

    Made by :meth:`ClusterCoordinator.create_per_worker_dataset`.

    Source: tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset.
    """

    def __init__(self, element_spec: Any, begin: Callable[[int], PerWorkerIterator]) -> None:
        self.element_spec = element_spec
        self._begin = begin
        self._epochs = itertools.count()

    def __iter__(self) -> PerWorkerIterator:
        return self._begin(next(self._epochs))


@final
@dataclass(frozen=True, slots=True)
class IteratorMaker:
    """Create a worker's iterator on the worker. The worker opens its pass itself, so a restarted worker has a new one.

    Attributes:
        link: The connection to the actor that runs the pass.
        jobs: The job of each worker's pass, from the beginning.
        skipping: Returns a worker's job without its first batches, given their number.
    """

    link: PipelineLink
    jobs: tuple[InputJob, ...]
    skipping: Callable[[InputJob, int, int], InputJob]

    def __call__(self, context: InputContext, drawn: int, generation: int) -> ReplicaIterator:
        """Return the iterator of one worker.

        Args:
            context: Identifies the worker.
            drawn: Number of batches that its ended closures have used.
            generation: Number of earlier starts of the worker.
        """
        worker = context.input_pipeline_id
        if generation:
            self.link.keyed(_key(self.link.key, worker, generation - 1)).close()
        link = self.link.keyed(_key(self.link.key, worker, generation))
        job = self.jobs[worker]
        link.call("open", self.skipping(job, worker, drawn) if drawn else job)
        return ReplicaIterator(link, held=True)


@final
@dataclass(frozen=True, slots=True)
class DealtIteratorMaker:
    """Create a worker's iterator over a pass whose splits go to whichever worker asks first.

    Attributes:
        link: The connection to the pass.
    """

    link: PipelineLink

    def __call__(self, context: InputContext, drawn: int, generation: int) -> ReplicaIterator:
        """Return the iterator of one worker; see `IteratorMaker`."""
        return ReplicaIterator(DynamicShardingLink(self.link, (context.input_pipeline_id, generation)), held=True)


def _key(key: str, worker: int, generation: int) -> str:
    return f"{key}-{worker}-{generation}"
