"""Options of one `strategy.run`: gradients, and replicas without rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from raydist.core.values import ReduceOp
from raydist.options.requirement import require


@final
@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one `strategy.run`: gradients, and replicas without rows.

    Attributes:
        gradient_reduce_op: MEAN weighs each replica by its share of the global batch's rows; SUM adds, for losses
            with a global denominator. None uses the scope's choice (MEAN by default). Gradients that a step assigns to
            `.grad` are reduced likewise, before `optimizer.step()`: under SUM, assign each replica's own part, not a
            sum by `ctx.all_reduce`.
        empty_batch: "pad" runs a replica without rows on two padding rows, taken from the same global batch, and drops
            all its results; "zero_rows" passes the zero rows and keeps the results, as TensorFlow does. Of several
            batches among the arguments the first one decides: a replica with rows of it gets its parts of the others,
            which may have zero rows. A global batch without any rows is run as on one device.
        on_nonfinite: Reaction to a NaN or an infinity in a gradient, the same on all replicas: "pass" none; "raise"
            makes `backward()` raise a FailedPreconditionError that names replica and parameter; with "skip" every
            `optimizer.step()` changes nothing (parameters, moments, counters) while `.grad` contains such a value, and
            `strategy.stats()` counts. The reduced gradients are checked once per backward pass, which reads them all,
            and on a GPU waits. A `GradScaler` checks by itself: use "pass" or "skip" with it.
        param_sync_every: Number of batches after which the replicas compare parameters and optimizer states; 0 for
            never. Costs a checksum of both, 6 GB/s.

    Raises:
        InvalidArgumentError: A value is invalid.

    Source: tf.distribute.RunOptions, with settings of its own.

    >>> RunOptions(gradient_reduce_op="sum").gradient_reduce_op
    <ReduceOp.SUM: 'SUM'>
    """

    gradient_reduce_op: ReduceOp | None = None
    empty_batch: Literal["pad", "zero_rows"] = "pad"
    on_nonfinite: Literal["pass", "raise", "skip"] = "pass"
    param_sync_every: int = 100

    def __post_init__(self) -> None:
        op = self.gradient_reduce_op
        if op is not None:
            object.__setattr__(self, "gradient_reduce_op", ReduceOp.parse(op))
            require(
                self.gradient_reduce_op in (ReduceOp.SUM, ReduceOp.MEAN), "gradient_reduce_op must be SUM or MEAN", op
            )
        require(
            self.empty_batch in ("pad", "zero_rows"),
            'empty_batch must be "pad" or "zero_rows"',
            self.empty_batch,
        )
        require(
            self.on_nonfinite in ("pass", "raise", "skip"),
            'on_nonfinite must be "pass", "raise" or "skip"',
            self.on_nonfinite,
        )
        every = self.param_sync_every
        require(isinstance(every, int) and every >= 0, "param_sync_every must be a number of batches, or 0", every)
