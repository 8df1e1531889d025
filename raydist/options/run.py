"""How one `strategy.run` treats gradients and replicas without rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from raydist.options.requirement import require
from raydist.values import ReduceOp

__all__ = ["RunOptions"]


@final
@dataclass(frozen=True, slots=True)
class RunOptions:
    """How one `strategy.run` treats gradients and replicas without rows.

    Attributes:
        gradient_reduce_op: MEAN weighs each replica by its share of the global batch's rows; SUM adds, for losses
            with a global denominator. None takes the scope's choice (MEAN unless given). Gradients that a step puts
            into `.grad` itself are reduced likewise, before `optimizer.step()`: under SUM, put there each replica's own
            part, not a sum that `ctx.all_reduce` has made.
        empty_batch: "stand_in" runs a replica without rows on two rows of the same global batch and drops everything
            it produces; "zero_rows" hands it the zero rows and keeps its results, as TensorFlow does. Of several
            batches among the arguments the first one decides: who has rows of it gets what it has of the others, which
            may be zero rows. A global batch without any rows is run as on one device.
        on_nonfinite: What a NaN or an infinity in a gradient does, the same on all replicas: "pass" nothing; "raise"
            makes `backward()` a FailedPreconditionError that names replica and parameter; with "skip" every
            `optimizer.step()` changes nothing (parameters, moments, counters) as long as `.grad` holds one,
            `strategy.stats()` counts. Looked at are the reduced gradients, once a backward pass: a read of them, and
            on a GPU a wait. A `GradScaler` looks by itself: "pass" and "skip" go with it.
        check_in_sync: After every so many batches the replicas compare parameters and the state of optimizers; 0 for
            never. Costs a checksum of both, 6 GB/s.

    Raises:
        InvalidArgumentError: A value is none of these.

    Source: tf.distribute.RunOptions, with settings of its own.

    >>> RunOptions(gradient_reduce_op="sum").gradient_reduce_op
    <ReduceOp.SUM: 'SUM'>
    """

    gradient_reduce_op: ReduceOp | None = None
    empty_batch: Literal["stand_in", "zero_rows"] = "stand_in"
    on_nonfinite: Literal["pass", "raise", "skip"] = "pass"
    check_in_sync: int = 100

    def __post_init__(self) -> None:
        op = self.gradient_reduce_op
        if op is not None:
            object.__setattr__(self, "gradient_reduce_op", ReduceOp.parse(op))
            require(
                self.gradient_reduce_op in (ReduceOp.SUM, ReduceOp.MEAN), "gradient_reduce_op must be SUM or MEAN", op
            )
        require(
            self.empty_batch in ("stand_in", "zero_rows"),
            'empty_batch must be "stand_in" or "zero_rows"',
            self.empty_batch,
        )
        require(
            self.on_nonfinite in ("pass", "raise", "skip"),
            'on_nonfinite must be "pass", "raise" or "skip"',
            self.on_nonfinite,
        )
        every = self.check_in_sync
        require(isinstance(every, int) and every >= 0, "check_in_sync must be a number of batches, or 0", every)
