"""Per-worker values and datasets. A log entry sends each worker a function that creates the worker's own value."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, final

from raydist.actors.class_tracking import cloudpickle
from raydist.actors.epochs.job import InputJob
from raydist.actors.epochs.link import DynamicShardingLink
from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.core.values import InputContext
from raydist.dataset import Dataset
from raydist.distributed_dataset.per_replica import chosen_policy, pickle_ops
from raydist.options import AutoShardPolicy, InputOptions, Timeouts
from raydist.pipelines.elements.seeds import draw_seed
from raydist.pipelines.optimize.file_shards import shard_files
from raydist.replicas.ps.work_message import LogEntry

if TYPE_CHECKING:
    from raydist.actors.epochs.input_pipeline_actors import InputPipelineActors
    from raydist.actors.epochs.link import PipelineLink
    from raydist.coordinator.coordinator import Coordinator

_ONLY_ON_WORKERS = (
    "exists only on the workers. Give it to coordinator.schedule in args, and use it in the scheduled function."
)


class PerWorkerValue:
    """A value that each worker creates for itself. The driver can only pass it to `schedule` as an argument."""

    __nest_leaf__ = True

    def __init__(self, name: str, keep: Any = None) -> None:
        self.name = name
        self._keep = keep

    def __reduce__(self) -> NoReturn:
        raise InvalidArgumentError(f"A {type(self).__name__} {_ONLY_ON_WORKERS} It cannot be pickled.")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


@final
class PerWorkerIterator(PerWorkerValue):
    """An iterator on each worker over the worker's dataset. Pass it to `schedule`; the scheduled function calls `next`.

    When the data of a worker ends, `next` raises StopIteration on that worker. If the function does not catch the
    StopIteration, `join` raises an OutOfRangeError. When a worker dies, its replacement continues after the last batch
    of the closures that the dead worker had finished.

    Source: the iterators of tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset.
    """

    def __next__(self) -> NoReturn:
        raise FailedPreconditionError(f"A per-worker iterator {_ONLY_ON_WORKERS}")

    def __iter__(self) -> NoReturn:
        raise FailedPreconditionError(f"A per-worker iterator {_ONLY_ON_WORKERS}")


@final
class PerWorkerDataset:
    """A dataset on each worker. Each `iter()` of it begins a new epoch and returns the argument for `schedule`.

    Created by :meth:`ClusterCoordinator.create_per_worker_dataset`.

    Source: tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset.
    """

    def __init__(self, element_spec: Any, begin: Callable[[int], PerWorkerIterator]) -> None:
        self.element_spec = element_spec
        self._begin = begin
        self._epochs = itertools.count()

    def __iter__(self) -> PerWorkerIterator:
        return self._begin(next(self._epochs))


def _open_iterator(
    link: PipelineLink,
    jobs: Sequence[InputJob],
    ops: Sequence[Any],
    context: InputContext,
    drawn: int,
    generation: int,
) -> ReplicaIterator:
    """Open an epoch for this worker, and return an iterator over the epoch. Runs on the worker after each start.

    Args:
        link: The connection to the actor that runs the epoch.
        jobs: The job of each worker, which reads its epoch from the beginning.
        ops: The dataset of each worker.
        context: Contains the number of this worker.
        drawn: Number of batches to skip.
        generation: Number of earlier starts of the worker.
    """
    worker = context.input_pipeline_id
    job = jobs[worker]
    if drawn:
        job = replace(job, ops=pickle_ops((Dataset(ops[worker]).skip(drawn)._op,)))
    if generation:
        link.keyed(f"{link.key}-{worker}-{generation - 1}").close()
    own = link.keyed(f"{link.key}-{worker}-{generation}")
    own.call("open", job)
    return ReplicaIterator(own, held=True)


def _open_dynamic_iterator(link: PipelineLink, context: InputContext, drawn: int, generation: int) -> ReplicaIterator:
    """Return an iterator over an epoch of all workers. Each split goes to the first worker that asks for one."""
    return ReplicaIterator(DynamicShardingLink(link, (context.input_pipeline_id, generation)), held=True)


def _make_value(fn: Callable[..., Any], context: InputContext, drawn: int, generation: int) -> Any:
    return _call_with_context(fn, context)


_SHARDINGS = (None, "static", "dynamic")


@final
class PerWorkerInput:
    """Per-worker values and datasets of one strategy.

    Args:
        num_workers: Returns the number of workers.
        coordinator: Returns the coordinator; starts the workers if there are none.
        pipelines: Returns the input pipelines.
        timeouts: The limits of waits of the input pipelines.
    """

    def __init__(
        self,
        num_workers: Callable[[], int],
        coordinator: Callable[[], Coordinator],
        pipelines: Callable[[], InputPipelineActors],
        timeouts: Timeouts,
    ) -> None:
        self._num_workers = num_workers
        self._coordinator = coordinator
        self._pipelines = pipelines
        self._timeouts = timeouts
        self._numbers = itertools.count()
        self._alive: weakref.WeakValueDictionary[str, PerWorkerValue] = weakref.WeakValueDictionary()
        self._dropped: collections.deque[str] = collections.deque()
        self._links: dict[str, PipelineLink] = {}
        self._is_registered = False  # True once the coordinator calls `_give_back` for dead workers

    def injected(self) -> dict[str, Any]:
        """Return the values that functions may use on every worker, by name.

        Also tell the workers to drop the values that the driver no longer references.
        """
        if self._dropped:
            names = tuple(self._dropped.popleft() for _ in range(len(self._dropped)))
            self._coordinator().record(LogEntry(dropped=names))
        return dict(self._alive)

    def value(self, fn: Callable[..., Any]) -> PerWorkerValue:
        """Implement `ClusterCoordinator.create_per_worker_values`."""
        if not callable(fn):
            raise InvalidArgumentError(f"create_per_worker_values needs a function, got {fn!r:.80}.")
        value = PerWorkerValue(f"value-{next(self._numbers)}")
        self._announce(value, functools.partial(_make_value, fn))
        return value

    def dataset(
        self, dataset: Dataset | Callable[..., Dataset], sharding: str | None, options: InputOptions
    ) -> PerWorkerDataset:
        """Implement `ClusterCoordinator.create_per_worker_dataset`."""
        if sharding not in _SHARDINGS:
            raise InvalidArgumentError(f'sharding must be None, "static" or "dynamic", got {sharding!r}.')
        if sharding == "dynamic":
            (whole,) = _datasets_of(dataset, None, 1)
            seed = _seeds_of([whole], same=True)[0]
            return PerWorkerDataset(whole.element_spec, functools.partial(self._begin_dynamic, whole, options, seed))
        datasets = _datasets_of(dataset, sharding, self._num_workers())
        begin = functools.partial(self._begin, datasets, options, _seeds_of(datasets, same=sharding is not None))
        return PerWorkerDataset(datasets[0].element_spec, begin)

    def _begin(self, datasets: list[Dataset], options: InputOptions, seeds: list[int], epoch: int) -> PerWorkerIterator:
        name = f"iterator-{next(self._numbers)}"
        link = self._pipelines().link_to_epochs(on_host=options.on_host)
        jobs = tuple(
            _job(dataset, f"epoch {epoch} of worker {worker}'s dataset", seed, epoch, options, self._timeouts)
            for worker, (dataset, seed) in enumerate(zip(datasets, seeds, strict=True))
        )
        iterator = PerWorkerIterator(name)
        ops = tuple(each._op for each in datasets)
        self._announce(iterator, functools.partial(_open_iterator, link, jobs, ops))
        return iterator

    def _begin_dynamic(self, dataset: Dataset, options: InputOptions, seed: int, epoch: int) -> PerWorkerIterator:
        """Return an iterator over one epoch of all workers. A worker gets a split when it asks for one."""
        name = f"iterator-{next(self._numbers)}"
        link = self._pipelines().link_to_epochs(on_host=options.on_host)
        label = f"epoch {epoch} of the dataset that all workers share"
        link.call("open", _job(dataset, label, seed, epoch, options, self._timeouts))
        iterator = PerWorkerIterator(name)
        self._links[name] = link
        self._announce(iterator, functools.partial(_open_dynamic_iterator, link))
        weakref.finalize(iterator, _end_epoch, self._links, name).atexit = False
        return iterator

    def _give_back(self, worker: int, generation: int, used: Mapping[str, int]) -> None:
        """Return the unused splits of a dead worker to their epochs, for other workers."""
        for name, link in list(self._links.items()):
            link.give_back_splits((worker, generation), used.get(name, 0))

    def _announce(self, value: PerWorkerValue, maker: Any) -> None:
        """Send the workers the function that creates this value."""
        try:
            pickled = cloudpickle.dumps(maker)
        except Exception as error:
            raise InvalidArgumentError(
                f"Per-worker values and datasets, and the functions in them, must be picklable, got "
                f"{type(error).__name__}: {error}. Open files and connections inside the function."
            ) from error
        coordinator = self._coordinator()
        if not self._is_registered:
            self._is_registered = True
            # The thread of the coordinator may outlive the strategy, and must not keep the strategy alive.
            coordinator.when_lost(functools.partial(_call_if_alive, weakref.WeakMethod(self._give_back)))
        coordinator.record(LogEntry(values=((value.name, pickled),)))
        self._alive[value.name] = value
        weakref.finalize(value, self._dropped.append, value.name)


def _end_epoch(links: dict[str, PipelineLink], name: str) -> None:
    links.pop(name).abandon()


def _call_if_alive(method: weakref.WeakMethod[Callable[..., None]], *args: Any) -> None:
    """Call a method if its object still exists."""
    found = method()
    if found is not None:
        found(*args)


def _seeds_of(datasets: Sequence[Dataset], *, same: bool) -> list[int]:
    """Return the seed of each worker's dataset. Shards of one dataset need the same seed, to use the same order."""
    drawn = [draw_seed() for _ in datasets]
    given = [each.options().seed for each in datasets]
    return [drawn[0 if same else worker] if seed is None else seed for worker, seed in enumerate(given)]


def _job(dataset: Dataset, label: str, seed: int, epoch: int, options: InputOptions, timeouts: Timeouts) -> InputJob:
    return InputJob(
        label=label,
        ops=pickle_ops((dataset._op,)),
        dealt=True,
        num_replicas=1,
        seed=seed,
        epoch=epoch,
        options=dataset.options(),
        input_options=options,
        timeouts=timeouts,
    )


def _datasets_of(dataset: Any, sharding: str | None, num_workers: int) -> list[Dataset]:
    contexts = [
        InputContext(num_workers, worker, 1) if sharding == "static" else InputContext(1, 0, 1)
        for worker in range(num_workers)
    ]
    if isinstance(dataset, Dataset):
        return [_shard_of(dataset, context) for context in contexts]
    if not callable(dataset):
        raise SpecError(
            f"create_per_worker_dataset needs an rd.Dataset, or a function that returns one, got "
            f"{type(dataset).__name__}. Give the dataset itself, not the result of distribute_dataset."
        )
    found = [_call_with_context(dataset, context) for context in contexts]
    wrong = next((each for each in found if not isinstance(each, Dataset)), None)
    if wrong is not None:
        raise SpecError(f"The function must return an rd.Dataset, got {type(wrong).__name__}.")
    return found


def _shard_of(dataset: Dataset, context: InputContext) -> Dataset:
    count, number = context.num_input_pipelines, context.input_pipeline_id
    if count == 1:
        return dataset
    policy = dataset.options().auto_shard_policy
    if policy is AutoShardPolicy.FILE or chosen_policy(dataset._op, policy, count) is AutoShardPolicy.FILE:
        return type(dataset)(shard_files(dataset._op, count, number))
    return dataset.shard(count, number)


def _call_with_context(fn: Callable[..., Any], context: InputContext) -> Any:
    """Call the function, with the context if it takes an argument."""
    try:
        inspect.signature(fn).bind(context)
    except TypeError:
        return fn()
    except ValueError:  # the callable has no signature
        return fn(context)
    return fn(context)
