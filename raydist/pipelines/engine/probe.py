"""Finding out what a function returns, by running it once on the first element."""

from __future__ import annotations

from typing import Any

from raydist.errors import FailedPreconditionError
from raydist.nest import unflatten
from raydist.pipelines.engine.build import plan_as_written, start
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.merged_options import merged_options
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.engine.op_iterator import OpIterator

__all__ = ["open_probe", "probe_spec"]


def open_probe(op: DatasetOp) -> OpIterator:
    """One pass over `op` in the caller's thread, for a look at first elements. The graph is run as it is written."""
    plan = plan_as_written(op, merged_options(op))
    return start(plan, plan_as_written, seed=0, epoch=0, executor=InlineExecutor())


def probe_spec(op: DatasetOp) -> Any:
    """Nest of TensorSpec of the first element of `op`.

    Raises:
        FailedPreconditionError: There is no first element.
        Exception: The function's own error on that element.
    """
    iterator = open_probe(op)
    try:
        first = iterator.next_block(1)
    except StopIteration:
        raise FailedPreconditionError(
            f"The element_spec of {op.label} is found by running it on a first element, and the dataset is empty. "
            "Declare it with output_spec=."
        ) from None
    finally:
        iterator.close()
    return unflatten(first.structure, first.specs)
