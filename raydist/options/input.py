"""How a distributed dataset is produced and split."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, final

from raydist.options.requirement import require
from raydist.values import AUTOTUNE

__all__ = ["InputOptions", "InputReplicationMode"]


@final
class InputReplicationMode(enum.Enum):
    """For whom a dataset function is called (tf.distribute.InputReplicationMode).

    Attributes:
        PER_WORKER: Once for each worker, whose replicas take turns with its elements.
        PER_REPLICA: Once for each replica.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@final
@dataclass(frozen=True, slots=True)
class InputOptions:
    """How a distributed dataset is produced and split (tf.distribute.InputOptions).

    Attributes:
        split: "per_batch" cuts each global batch of b rows into N pieces of ceil(b / N), later ones shorter or
            empty; "balanced" gives every replica b // N or one more, and takes turns with the extra rows.
        num_input_workers: Actors that run the map and filter functions; 0 runs them in the process that hosts the
            pipeline; AUTOTUNE (default) lets raydist choose, and add some where they would be faster.
        resources_per_input_worker: Ray resources of one input worker, e.g. {"CPU": 1}; "memory" (bytes) is also what
            it may take at most.
        prefetch_batches: Global batches kept ready at most; None for the number of replicas, and for more of small ones
            that are taken quickly: for a tenth of a second, in some megabytes a replica.
        per_replica: For `distribute_datasets_from_function`: call the function once per replica, not once per worker.
        zero_copy: Hand out read-only mappings of the object store on the CPU. A step must not work in place on them.
        experimental_fetch_to_device: Batches come to replicas on their device, copied while the step before computes;
            False leaves them in the host's memory.
        experimental_replication_mode: `InputReplicationMode.PER_REPLICA` is TensorFlow's word for `per_replica=True`.
        experimental_place_dataset_on_device: Another word for batches on the device, which TensorFlow wants without
            `experimental_fetch_to_device` and with PER_REPLICA.
        experimental_per_replica_buffer_size: TensorFlow's word for `prefetch_batches`; 0 keeps one ready as well.

    Raises:
        InvalidArgumentError: A value is none of these, or two of them contradict each other.

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
        """Whether replicas get their batches in the host's memory, whatever their device.

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
