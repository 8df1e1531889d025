"""`rd.summary.scalar`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import ReduceOp
from raydist.summary.record import SummaryData
from raydist.summary.recording import record


def scalar(name: str, data: Any, step: Any = None, reduce_op: ReduceOp | str = ReduceOp.MEAN) -> bool:
    """Show a number at a step: a point of a curve.

    In a step on several replicas this is the mean of their numbers, weighted by the rows of their batches, or their
    sum. The number is sent with the step's result: the call does not block.

    Args:
        name: Name of the curve.
        data: The number: a tensor of one element, a numpy or a Python number.
        step: The step; None: the step of the writer's `as_default`, else the global step.
        reduce_op: `ReduceOp.MEAN` or `SUM`, or its name.

    Returns:
        True if there is a writer that takes the record; without one the call does nothing.

    Raises:
        InvalidArgumentError: `data` is not one number, `step` is not a whole number, or `reduce_op` is another one.

    Source: tf.summary.scalar.

    >>> rd.summary.scalar("loss", 0.5, step=0)  # there is no writer
    False
    """
    op = ReduceOp.parse(reduce_op)
    if op not in (ReduceOp.MEAN, ReduceOp.SUM):
        raise InvalidArgumentError(f"reduce_op of a scalar must be MEAN or SUM, got {op.name}. Leave it out for MEAN.")
    return record(name, step, lambda weight: ScalarValue(_number(name, data), weight, op is ReduceOp.SUM))


def _number(name: str, data: Any) -> Any:
    if isinstance(data, torch.Tensor) and data.device.type != "cpu" and data.numel() == 1:
        return data.detach().clone()  # read together with the step's result, which waits for the device once
    try:
        return float(data.item() if hasattr(data, "item") else data)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        shape = getattr(data, "shape", None)
        got = type(data).__name__ if shape is None else f"{type(data).__name__} of shape {tuple(shape)}"
        raise InvalidArgumentError(
            f"scalar {name!r} must be one number, got {got}. Reduce it first, e.g. by .mean()."
        ) from error


@final
@dataclass(frozen=True, slots=True)
class ScalarValue(SummaryData):
    """A number.

    Attributes:
        value: The number; before `settled` possibly a tensor of one element.
        weight: Weight of the number among those of other replicas.
        is_sum: Add the numbers, regardless of weights.
    """

    value: Any
    weight: float = 1.0
    is_sum: bool = False

    def settled(self) -> SummaryData:
        return self if type(self.value) is float else replace(self, value=float(self.value))

    def merged(self, others: Sequence[Self]) -> SummaryData:
        every: Sequence[Self] = (self, *others)
        if self.is_sum:
            return replace(self, value=_sum([each.value for each in every]))
        weight = _sum([each.weight for each in every])
        if not weight:  # no replica had rows
            return replace(self, value=_sum([each.value for each in every]) / len(every))
        # Values without weight are skipped: a mean of no rows is NaN.
        total = _sum([each.value * each.weight for each in every if each.weight])
        return replace(self, value=total / weight, weight=weight)


def _sum(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
