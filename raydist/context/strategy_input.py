"""The input methods of every strategy: datasets that are split between replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from raydist.errors import SpecError
from raydist.options import InputOptions
from raydist.values import InputContext

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from raydist.dataset import Dataset

__all__ = ["StrategyInput", "require_dataset"]


class StrategyInput(ABC):
    """Methods for distributed datasets."""

    @abstractmethod
    def distribute_dataset(self, dataset: Dataset | DataLoader[Any], options: InputOptions | None = None) -> Any:
        """Distribute a dataset, batched by the *global* batch size: each replica gets its piece of every batch.

        With replica actors, an actor makes batches while replicas train on earlier ones. Does not block; iterators of
        the result block until their next batch is there (limit: `Timeouts.input_s`).

        Shapes: a batch of b rows -> pieces of ceil(b / N) rows for N replicas, later ones shorter or empty
            (`InputOptions.split` has another way).

        Args:
            dataset: A dataset whose last step is `batch`, by rows of all replicas together; or a torch DataLoader,
                whose batch size is then the global one: see `Dataset.from_torch`.
            options: Workers, buffers, and the way in which a batch is split.

        Returns:
            A DistributedDataset: each `iter()` of it begins an epoch, whose batches have one PerReplica per leaf (plain
            tensors for one replica), on the replica's device.

        Raises:
            FailedPreconditionError: The strategy is closed.
            SpecError: `dataset` is neither.
            InvalidArgumentError: The dataset was never batched; there are fewer files than workers, under
                `AutoShardPolicy.FILE` and `AUTO`; or `options` are for datasets from a function. While iterating: the
                leaves of a batch do not have equally many rows (mark whole values with `rd.Replicated`).
            NotFoundError: The dataset reads no files, under `AutoShardPolicy.FILE` with several workers.

        Source: tf.distribute.Strategy.experimental_distribute_dataset.

        >>> strategy = rd.OneDeviceStrategy("cpu")
        >>> [batch.tolist() for batch in strategy.distribute_dataset(rd.Dataset.range(5).batch(3))]
        [[0, 1, 2], [3, 4]]
        """

    @abstractmethod
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> Any:
        """Distribute datasets that the user batches per replica; nothing is split or added.

        Each replica in turn takes one of the function's batches, so N batches make one step. Blocks like
        `distribute_dataset`.

        Args:
            dataset_fn: Makes the dataset, batched by rows of *one* replica; called with an InputContext once per worker
                (node), whose replicas take turns (once per replica with `InputOptions.per_replica`).
            options: Workers, buffers, and the number of calls of `dataset_fn`.

        Returns:
            A DistributedDataset, as from `distribute_dataset`.

        Raises:
            FailedPreconditionError: The strategy is closed.
            SpecError: `dataset_fn` did not return a raydist.Dataset.

        Source: tf.distribute.Strategy.distribute_datasets_from_function.

        >>> def make(context):
        ...     return rd.Dataset.range(4).batch(context.get_per_replica_batch_size(2))
        >>> batches = rd.OneDeviceStrategy("cpu").distribute_datasets_from_function(make)
        >>> [batch.tolist() for batch in batches]
        [[0, 1], [2, 3]]
        """

    @final
    def make_numpy_dataset(self, arrays: Any) -> Dataset:
        """Make a dataset of the rows of a nest of arrays: `Dataset.from_tensor_slices`. Does not block.

        Args:
            arrays: A nest of arrays, tensors or lists of one length.

        Returns:
            A Dataset of that many elements.

        Raises:
            InvalidArgumentError: A leaf is a single number, or the numbers of rows differ.

        Source: tf.distribute.Strategy.experimental_make_numpy_dataset.

        >>> [element["x"].item() for element in rd.OneDeviceStrategy("cpu").make_numpy_dataset({"x": [1, 2]})]
        [1, 2]
        """
        from raydist.dataset import Dataset  # not imported by replicas, which do not need it: half of their imports

        return Dataset.from_tensor_slices(arrays)


def require_dataset(dataset: Any) -> Dataset:
    """Return `dataset`, or the Dataset of a torch DataLoader's batches; raise SpecError for anything else."""
    from raydist.dataset import Dataset  # not imported by replicas, which do not need it: half of their imports
    from raydist.pipelines.sources.torch_datasets import is_torch_loader

    if is_torch_loader(dataset):
        return Dataset.from_torch(dataset)
    if not isinstance(dataset, Dataset):
        raise SpecError(
            f"A raydist.Dataset or a torch DataLoader must be given, got {type(dataset).__name__}. "
            "Make one with Dataset.from_tensor_slices, from_torch, from_generator or another source."
        )
    return dataset
