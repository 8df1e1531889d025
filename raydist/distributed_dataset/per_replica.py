"""Distributed datasets whose batches have one part per replica, made by input pipelines on actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

from raydist.actors.readers.driver_iterator import DistributedIterator
from raydist.core.nest import NOTHING, map_structure
from raydist.core.values import InputContext
from raydist.distributed_dataset.base import DistributedDataset, require_batches, require_shared
from raydist.distributed_dataset.layout import InputLayout
from raydist.options import InputOptions
from raydist.pipelines.elements.spec import TensorSpec

if TYPE_CHECKING:
    from raydist.dataset import Dataset
    from raydist.distributed_dataset.input_side import InputSide
    from raydist.pipelines.elements.items import IteratorState


@final
class PerReplicaDataset(DistributedDataset):
    """A distributed dataset whose batches are nests of PerReplica, made by an input pipeline on an actor."""

    def __init__(
        self, datasets: Sequence[Dataset], side: InputSide, options: InputOptions, layout: InputLayout
    ) -> None:
        super().__init__(datasets, options)
        self._side = side
        self._layout = layout

    @property
    def element_spec(self) -> Any:
        return map_structure(self._piece_spec, self._datasets[0].element_spec, none=NOTHING)

    def _piece_spec(self, spec: TensorSpec) -> TensorSpec:
        if not spec.shape:
            return spec
        count = 1 if self._layout.dealt else self._side.num_replicas
        ends_apart = self._side.num_replicas > 1 and (self._layout.dealt or len(self._layout.of_workers) > 1)
        if spec.shape[0] is None or spec.shape[0] % count or ends_apart:
            return TensorSpec((None, *spec.shape[1:]), spec.dtype)
        return TensorSpec((spec.shape[0] // count, *spec.shape[1:]), spec.dtype)

    def _open_epoch(self, epoch: int, position: IteratorState | None = None) -> DistributedIterator:
        options = self._datasets[0].options()
        job = self._layout.at_epoch(epoch, position).job(
            self._side,
            seed=self._epochs.seed,
            epoch=epoch,
            options=options,
            input_options=self._options,
        )
        return DistributedIterator(self._side.opener, job, find_spec=lambda: self.element_spec, drain=self._side.drain)


def distribute(dataset: Dataset, side: InputSide, options: InputOptions) -> DistributedDataset:
    """Return the distribution of a dataset of global batches, each split into one piece per replica.

    Under `AutoShardPolicy.FILE` and `OFF` each of several workers has its own batches, and distributes their pieces.

    Raises:
        InvalidArgumentError: `per_replica` is set, which is for datasets from a function; the dataset is not batched.
    """
    require_shared(options)
    require_batches(dataset)
    policy = dataset.options().auto_shard_policy
    layout = InputLayout.of_batches(dataset._op, policy, side.num_workers)
    return PerReplicaDataset([dataset], side, options, layout)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Dataset], side: InputSide, options: InputOptions
) -> DistributedDataset:
    """Return the distribution of datasets of per-replica elements: element k of a worker goes to its replica k % R.

    The function is called once per worker; with `InputOptions(per_replica=True)` once per replica, and each replica
    reads its own dataset.
    """
    count = side.num_replicas if options.per_replica else side.num_workers
    datasets = [dataset_fn(InputContext(count, number, side.num_replicas)) for number in range(count)]
    layout = InputLayout.of_elements([dataset._op for dataset in datasets], side.num_workers)
    return PerReplicaDataset(datasets, side, options, layout)
