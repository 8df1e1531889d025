"""`rd.summary.scalar`, `rd.summary.histogram`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from raydist.errors import InvalidArgumentError
from raydist.summaries.counting import counted
from raydist.summaries.scalar_values import ScalarValue
from raydist.summary.numpy_data import as_array
from raydist.summary.recording import record
from raydist.values import ReduceOp

__all__ = ["histogram", "scalar"]


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
    return record(name, step, lambda share: ScalarValue(_number(name, data), share, op is ReduceOp.SUM))


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


def histogram(name: str, data: Any, step: Any = None) -> bool:
    """Show the distribution of numbers at a step.

    Numbers are counted in their process, into buckets with fixed edges; in a step on several replicas the counts of
    all are added. NaN and infinite numbers are skipped, with one warning.

    Shapes: any.

    Args:
        name: Name of the histogram.
        data: The numbers.
        step: The step; None: the step of the writer's `as_default`, else the global step.

    Returns:
        True if there is a writer that takes the record; without one the call does nothing.

    Raises:
        InvalidArgumentError: `data` is not numeric, or `step` is not a whole number.

    Source: tf.summary.histogram; its edges are those of TensorFlow 1 and TensorBoard, so that counts can be added.

    >>> import torch
    >>> rd.summary.histogram("weights", torch.randn(3, 4), step=0)  # there is no writer
    False
    """
    return record(name, step, lambda share: counted(_numbers(name, data)))


def _numbers(name: str, data: Any) -> np.ndarray[Any, np.dtype[Any]]:
    array = as_array(data)
    if array.dtype.kind not in "biuf":
        raise InvalidArgumentError(
            f"histogram {name!r} must be of real numbers, got {array.dtype}. Take e.g. the abs() of complex ones."
        )
    return array
