"""A strategy's view of a dataset: every batch is a nest with one part per replica.

The driver handles references only; input pipelines on actors make the batches, and replicas map them into memory.
"""

from __future__ import annotations

from raydist.actors.readers.driver_epoch import BatchLeaf
from raydist.actors.readers.driver_iterator import DistributedIterator
from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.distributed_dataset.base import DistributedDataset, require_batches, require_shared
from raydist.distributed_dataset.local import LocalDistributedDataset
from raydist.distributed_dataset.per_replica import (
    InputSide,
    PerReplicaDataset,
    ReplicaCount,
    distribute,
    distribute_from_function,
)

__all__ = [
    "BatchLeaf",
    "DistributedDataset",
    "DistributedIterator",
    "InputSide",
    "LocalDistributedDataset",
    "PerReplicaDataset",
    "ReplicaCount",
    "ReplicaIterator",
    "distribute",
    "distribute_from_function",
    "require_batches",
    "require_shared",
]
