"""Options for producing and splitting distributed datasets."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, final

from raydist.core.values import AUTOTUNE
from raydist.options.requirement import require


@final
class InputReplicationMode(enum.Enum):
    """The unit for which a dataset function is called (tf.distribute.InputReplicationMode).

    Attributes:
        PER_WORKER: Once for each worker, whose replicas receive its elements in turn.
        PER_REPLICA: Once for each replica.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@final
@dataclass(frozen=True, slots=True)
class InputOptions:
    """Options for producing and splitting a distributed dataset (tf.distribute.InputOptions).

    Attributes:
        split: "per_batch" splits each global batch of b rows into N pieces of ceil(b / N), later ones shorter or
            empty; "balanced" gives every replica b // N or one more, and rotates the extra rows.
        num_input_workers: Actors that run the map and filter functions; 0 runs them in the process that hosts the
            pipeline; AUTOTUNE (default) means the cores that neither replicas nor the pipeline use, at most 8 a node.
        resources_per_input_worker: Ray resources of one input worker, e.g. {"CPU": 1}; "memory" (bytes) also limits
            the worker's memory.
        prefetch_batches: Maximum number of global batches kept ready; None for the number of replicas, and for more if
            batches are small and read quickly: for a tenth of a second, in some megabytes per replica.
        per_replica: For `distribute_datasets_from_function`: call the function once per replica, not once per worker.
        zero_copy: Return read-only mappings of the object store on the CPU. A step must not modify them in place.
        experimental_fetch_to_device: Deliver batches on the replicas' devices, copied while the previous step computes;
            False leaves batches in host memory.
        experimental_replication_mode: `InputReplicationMode.PER_REPLICA` is TensorFlow's form of `per_replica=True`.
        experimental_place_dataset_on_device: TensorFlow's option for batches on the device; TensorFlow requires
            PER_REPLICA and no `experimental_fetch_to_device` with it.
        experimental_per_replica_buffer_size: TensorFlow's name of `prefetch_batches`; 0 keeps one ready as well.

    Raises:
        InvalidArgumentError: A value is invalid, or two values contradict each other.

    Source: tf.distribute.InputOptions, with settings of its own.

    >>> InputOptions(split="balanced", num_input_workers=2).split
    'balanced'
    """

    split: Literal["per_batch", "balanced"] = "per_batch"
    num_input_workers: int = AUTOTUNE
    resources_per_input_worker: Mapping[str, float] = field(default_factory=dict)
    prefetch_batches: int | None = None
    per_replica: bool = False
    zero_copy: bool = False
    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode | None = None
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int | None = None

    def __post_init__(self) -> None:
        self._check_replication()
        self._check_buffer()
        require(self.split in ("per_batch", "balanced"), 'split must be "per_batch" or "balanced"', self.split)
        workers = self.num_input_workers
        require(workers >= 0 or workers == AUTOTUNE, "num_input_workers must be >= 0 or AUTOTUNE", workers)
        ahead = self.prefetch_batches
        require(ahead is None or ahead >= 1, "prefetch_batches must be >= 1 or None", ahead)

    @property
    def on_host(self) -> bool:
        """True if replicas get their batches in host memory, whatever their device.

        >>> InputOptions(experimental_fetch_to_device=False).on_host
        True
        """
        return not (self.experimental_fetch_to_device or self.experimental_place_dataset_on_device)

    def _check_replication(self) -> None:
        mode = self.experimental_replication_mode
        known = mode is None or isinstance(mode, InputReplicationMode)
        require(known, "experimental_replication_mode must be an InputReplicationMode or None", mode)
        each = mode is InputReplicationMode.PER_REPLICA or (mode is None and self.per_replica)
        require(each or not self.per_replica, "per_replica=True needs experimental_replication_mode=PER_REPLICA", mode)
        object.__setattr__(self, "per_replica", each)
        if self.experimental_place_dataset_on_device:
            what = "experimental_place_dataset_on_device=True needs"
            require(each, f"{what} experimental_replication_mode=PER_REPLICA", mode)
            fetch = self.experimental_fetch_to_device
            require(not fetch, f"{what} experimental_fetch_to_device=False", fetch)

    def _check_buffer(self) -> None:
        size, ahead = self.experimental_per_replica_buffer_size, self.prefetch_batches
        if size is None:
            return
        require(size >= 0, "experimental_per_replica_buffer_size must be >= 0 or None", size)
        require(
            ahead in (None, max(1, size)),
            "prefetch_batches and experimental_per_replica_buffer_size mean the same and must not differ",
            (ahead, size),
        )
        object.__setattr__(self, "prefetch_batches", max(1, size))
