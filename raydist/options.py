"""Settings a user hands in: for a pipeline, for distributed input, for one `run`, and every time limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, final

from raydist.errors import InvalidArgumentError
from raydist.values import AUTOTUNE, ReduceOp

__all__ = ["InputOptions", "RunOptions", "Timeouts"]


def _require(ok: bool, what: str, got: object) -> None:
    if not ok:
        raise InvalidArgumentError(f"{what}, got {got!r}.")


@final
@dataclass(frozen=True, slots=True)
class InputOptions:
    """How a distributed dataset is produced and split (tf.distribute.InputOptions).

    Attributes:
        split: "per_batch" cuts each global batch of b rows into N pieces of ceil(b / N), later ones shorter or
            empty; "balanced" gives every replica b // N or one more, and takes turns with the extra rows.
        num_input_workers: Actors that run the map and filter functions; 0 runs them in the process that hosts the
            pipeline; AUTOTUNE (default) lets raydist choose.
        resources_per_input_worker: Ray resources of one input worker, e.g. {"CPU": 1}.
        prefetch_batches: Global batches kept ready; None for the number of replicas.
        per_replica: For `distribute_datasets_from_function`: call the function once per replica, not once per worker.
        zero_copy: Hand out read-only mappings of the object store on the CPU. A step must not work in place on them.
    """

    split: Literal["per_batch", "balanced"] = "per_batch"
    num_input_workers: int = AUTOTUNE
    resources_per_input_worker: Mapping[str, float] = field(default_factory=dict)
    prefetch_batches: int | None = None
    per_replica: bool = False
    zero_copy: bool = False

    def __post_init__(self) -> None:
        _require(self.split in ("per_batch", "balanced"), 'split must be "per_batch" or "balanced"', self.split)
        workers = self.num_input_workers
        _require(workers >= 0 or workers == AUTOTUNE, "num_input_workers must be >= 0 or AUTOTUNE", workers)
        ahead = self.prefetch_batches
        _require(ahead is None or ahead >= 1, "prefetch_batches must be >= 1 or None", ahead)


@final
@dataclass(frozen=True, slots=True)
class RunOptions:
    """How one `strategy.run` treats gradients and replicas without rows.

    Attributes:
        gradient_reduce_op: MEAN weighs each replica by its share of the global batch's rows; SUM adds, for losses
            with a global denominator. None takes the scope's choice (MEAN unless given).
        empty_batch: "stand_in" runs a replica without rows on two rows of the same global batch and drops everything
            it produces; "zero_rows" hands it the zero rows and keeps its results, as TensorFlow does.
    """

    gradient_reduce_op: ReduceOp | None = None
    empty_batch: Literal["stand_in", "zero_rows"] = "stand_in"

    def __post_init__(self) -> None:
        op = self.gradient_reduce_op
        if op is not None:
            object.__setattr__(self, "gradient_reduce_op", ReduceOp.parse(op))
            _require(
                self.gradient_reduce_op in (ReduceOp.SUM, ReduceOp.MEAN), "gradient_reduce_op must be SUM or MEAN", op
            )
        _require(
            self.empty_batch in ("stand_in", "zero_rows"),
            'empty_batch must be "stand_in" or "zero_rows"',
            self.empty_batch,
        )


@final
@dataclass(frozen=True, slots=True)
class Timeouts:
    """The limit of every wait, in seconds. No wait of raydist is longer than one of these.

    Attributes:
        start_s: Until Ray is up and every actor is placed and answers.
        collective_s: One collective: how long ranks wait for the slowest of them (its compute included).
        step_s: One dispatched step, from its dispatch to its result, queueing included.
        input_s: The next element from an input pipeline.
        element_s: One call of a user's function on one block, on a pool of input workers.
        close_s: Until everything has stopped when closing; what still lives then is killed.
        poll_s: One long poll between actors; only a longer limit above ends a wait.
    """

    start_s: float = 120.0
    collective_s: float = 300.0
    step_s: float = 3600.0
    input_s: float = 600.0
    element_s: float = 600.0
    close_s: float = 10.0
    poll_s: float = 5.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            _require(
                isinstance(value, int | float) and 0 < value < float("inf"),
                f"Timeouts.{limit.name} must be a finite number of seconds > 0",
                value,
            )
