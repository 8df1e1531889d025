"""A strategy's view of a dataset: every batch is a nest with one part per replica.

The driver handles references only; an input pipeline on an actor makes the batches, and the replicas map them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, final

import cloudpickle

from raydist.actors.passes.job import InputJob
from raydist.actors.readers.driver_iterator import BatchLeaf, DistributedIterator, PassOpener
from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.actors.workers.executors import open_executor
from raydist.errors import InvalidArgumentError
from raydist.nest import NOTHING, map_structure
from raydist.options import InputOptions, Timeouts
from raydist.pipelines.elements.convert import torch_rows
from raydist.pipelines.elements.seeds import draw_seed
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.optional import Optional
from raydist.pipelines.run.split import no_rows_error
from raydist.values import InputContext

if TYPE_CHECKING:
    import torch

    from raydist.dataset import Dataset
    from raydist.options import Options
    from raydist.pipelines.elements.blocks import Block
    from raydist.pipelines.elements.items import State

__all__ = [
    "BatchLeaf",
    "DistributedDataset",
    "DistributedIterator",
    "InputSide",
    "LocalDistributedDataset",
    "PerReplicaDataset",
    "ReplicaIterator",
    "distribute",
    "distribute_from_function",
]


class ResumableIterator(Protocol):
    """What `iter()` of a distributed dataset gives, whoever makes the batches."""

    @property
    def element_spec(self) -> Any:
        """Nest of TensorSpec of one replica's part of a batch."""

    def __iter__(self) -> Self: ...

    def __next__(self) -> Any: ...

    def get_next(self) -> Any:
        """Like `next`, but raises OutOfRangeError at the end."""

    def get_next_as_optional(self) -> Optional[Any]:
        """The next batch, or an empty Optional at the end."""

    def state_dict(self) -> State:
        """JSON-able state after the last batch handed out."""

    def load_state_dict(self, state: State) -> None:
        """Go on after the batch at which `state` was taken."""

    def close(self) -> None:
        """Stop what produces the batches."""


class DistributedDataset(ABC):
    """A dataset as a strategy hands it out. It has no transformations; every `iter()` is a new epoch of it.

    Made by `Strategy.distribute_dataset` and `Strategy.distribute_datasets_from_function`. On several replicas each
    leaf of a batch is a :class:`PerReplica` of their parts, on one device a plain tensor. `InputOptions.split` says how
    a global batch of b rows is cut for N replicas: by default into parts of ceil(b / N) rows, later ones shorter.

    Args:
        datasets: What it is made from: one dataset of global batches, or one of elements per input pipeline.
        options: How it is distributed.

    >>> strategy = rd.OneDeviceStrategy("cpu")
    >>> view = strategy.distribute_dataset(rd.Dataset.range(4).batch(2))  # 2 rows over all replicas
    >>> [strategy.run(lambda x: x + 1, args=(batch,)).tolist() for batch in view]
    [[1, 2], [3, 4]]

    Source: tf.distribute.DistributedDataset.
    """

    def __init__(self, datasets: Sequence[Dataset], options: InputOptions) -> None:
        self._datasets = tuple(datasets)
        self._options = options
        self._num_iterations = 0
        self._drawn_seed: int | None = None

    @property
    def options(self) -> InputOptions:
        """How it is distributed.

        >>> view = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2))
        >>> view.options == rd.InputOptions()
        True

        Source: the `options` of tf.distribute.Strategy.experimental_distribute_dataset.
        """
        return self._options

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """Nest of TensorSpec of one replica's part of a batch; None stands for a length that is not always the same.

        It may run a user's function on one element to learn what it returns, as `Dataset.element_spec` does.

        >>> view = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2, drop_remainder=True))
        >>> view.element_spec
        TensorSpec(shape=(2,), dtype=int64)

        Source: tf.distribute.DistributedDataset.element_spec.
        """

    def cardinality(self) -> int:
        """Number of batches: that of the dataset it was made from (of the first one, where there are several).

        Returns:
            The number, or `rd.INFINITE_CARDINALITY` or `rd.UNKNOWN_CARDINALITY`, which are negative.

        >>> rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(5).batch(2)).cardinality()
        3

        Source: tf.data.Dataset.cardinality.
        """
        return self._datasets[0].cardinality()

    def _next_epoch(self) -> int:
        self._num_iterations += 1
        return self._num_iterations - 1

    def _seed(self, options: Options) -> int:
        """The seed of every epoch: as given, or drawn once, so that what is not reshuffled stays as it is."""
        if self._drawn_seed is None:
            self._drawn_seed = draw_seed()
        return self._drawn_seed if options.seed is None else options.seed

    @abstractmethod
    def __iter__(self) -> ResumableIterator:
        """A new epoch. Returns at once: nothing runs before the first batch is asked for.

        Returns:
            A :class:`DistributedIterator`; on one device a :class:`DatasetIterator`, which has the same methods.

        Source: tf.distribute.DistributedDataset.

        >>> view = rd.OneDeviceStrategy("cpu").distribute_dataset(rd.Dataset.range(4).batch(2))
        >>> iterator = iter(view)
        >>> next(iterator).tolist(), iterator.get_next().tolist()
        ([0, 1], [2, 3])
        >>> iterator.close()
        """


@final
class LocalDistributedDataset(DistributedDataset):
    """The whole of every batch for the one replica in this process, as plain tensors. Needs no Ray.

    Args:
        dataset: The dataset.
        device: Where tensors go; None for the CPU.
        options: How it is distributed; one replica gets everything, however it is split.
        on_batch: Told about each batch before it is handed out.
        dealt: Elements are those of one replica, of any shape; else batches, whose leaves all have rows.

    >>> from raydist.dataset import Dataset
    >>> [batch.tolist() for batch in LocalDistributedDataset(Dataset.range(5).batch(3))]
    [[0, 1, 2], [3, 4]]
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        device: torch.device | None = None,
        options: InputOptions | None = None,
        on_batch: Callable[[Any], None] | None = None,
        dealt: bool = False,
    ) -> None:
        super().__init__([dataset], options or InputOptions())
        self._device = device
        self._dealt = dealt
        self._on_batch = on_batch

    @property
    def element_spec(self) -> Any:
        return self._datasets[0].element_spec

    def __iter__(self) -> DatasetIterator[Any]:
        dataset = self._datasets[0]
        options = dataset.options()
        return DatasetIterator(
            dataset._op,
            options=options,
            seed=self._seed(options),
            epoch=self._next_epoch(),
            convert=self._convert,
            make_executor=open_executor,
        )

    def _convert(self, block: Block) -> list[Any]:
        from torch import from_numpy  # the layers above this one decide when torch is imported

        block = block.of_tensors("a distributed dataset")
        if not self._dealt:
            _require_batches(block)
        rows: list[Any] = torch_rows(block, from_numpy)
        if self._device is not None and self._device.type != "cpu":
            rows = [map_structure(self._move, row) for row in rows]
        if self._on_batch is not None:
            for row in rows:
                self._on_batch(row)
        return rows

    def _move(self, value: Any) -> Any:
        return value.to(self._device) if hasattr(value, "to") else value


def _require_batches(block: Block) -> None:
    """As on several replicas, so that a program that runs on one device runs on all."""
    for spec, path in zip(block.specs, block.structure.paths(), strict=True):
        if spec.shape == ():
            raise no_rows_error(spec.dtype.name, path)


@final
class PerReplicaDataset(DistributedDataset):
    """A distributed dataset whose batches are nests of PerReplica, made by an input pipeline on an actor."""

    def __init__(self, datasets: Sequence[Dataset], side: InputSide, options: InputOptions, *, dealt: bool) -> None:
        super().__init__(datasets, options)
        self._side = side
        self._dealt = dealt

    @property
    def element_spec(self) -> Any:
        spec = self._datasets[0].element_spec
        return spec if self._dealt else map_structure(self._piece_spec, spec, none=NOTHING)

    def _piece_spec(self, spec: TensorSpec) -> TensorSpec:
        if not spec.shape or spec.shape[0] is None or spec.shape[0] % self._side.num_replicas:
            return TensorSpec((None, *spec.shape[1:]) if spec.shape else spec.shape, spec.dtype)
        return TensorSpec((spec.shape[0] // self._side.num_replicas, *spec.shape[1:]), spec.dtype)

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(
            self._side.opener, self._job(), find_spec=lambda: self.element_spec, drain=self._side.drain
        )

    def _job(self) -> InputJob:
        ops = tuple(dataset._op for dataset in self._datasets)
        options = self._datasets[0].options()
        epoch = self._next_epoch()
        return InputJob(
            label=f"epoch {epoch} of the distributed dataset",
            ops=pickle_ops(ops),
            dealt=self._dealt,
            num_replicas=self._side.num_replicas,
            seed=self._seed(options),
            epoch=epoch,
            options=options,
            input_options=self._options,
            timeouts=self._side.timeouts,
        )


def pickle_ops(ops: Any) -> bytes:
    """The bytes of a pipeline; InvalidArgumentError that shows what cannot be pickled."""
    try:
        data: bytes = cloudpickle.dumps(ops)
    except Exception as error:
        raise InvalidArgumentError(
            f"A distributed dataset must be picklable, with the functions given to it and what these refer to: "
            f"{type(error).__name__}: {error}. Open files, locks and connections inside the function, or use "
            "from_generator with a function that opens them."
        ) from error
    return data


@final
@dataclass(frozen=True, slots=True)
class InputSide:
    """What a strategy gives to the datasets it distributes.

    Attributes:
        opener: Starts passes: the strategy's `InputHost`.
        num_replicas: Number of replicas.
        timeouts: Limits.
        drain: Waits until every dispatched step is done (the replicas may be reading an iterator).
    """

    opener: PassOpener
    num_replicas: int
    timeouts: Timeouts
    drain: Callable[[], None]


def distribute(dataset: Dataset, side: InputSide, options: InputOptions) -> DistributedDataset:
    """A dataset of global batches, each cut into one piece per replica."""
    return PerReplicaDataset([dataset], side, options, dealt=False)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Dataset], side: InputSide, options: InputOptions
) -> DistributedDataset:
    """Datasets of per-replica elements: element k of a worker's dataset goes to its replica k % N.

    With `InputOptions(per_replica=True)` the function is called once per replica, and each reads its own dataset.
    """
    num_pipelines = side.num_replicas if options.per_replica else 1
    datasets = [dataset_fn(InputContext(num_pipelines, i, side.num_replicas)) for i in range(num_pipelines)]
    return PerReplicaDataset(datasets, side, options, dealt=True)
