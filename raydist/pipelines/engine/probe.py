"""Finding out what a function returns, by running it once on the first element."""

from __future__ import annotations

from typing import Any

from raydist.errors import FailedPreconditionError
from raydist.nest import unflatten
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.merged_options import merged_options
from raydist.pipelines.engine.op import DatasetOp

__all__ = ["probe_spec"]


def probe_spec(op: DatasetOp) -> Any:
    """Nest of TensorSpec of the first element of `op`.

    Raises:
        FailedPreconditionError: There is no first element.
        Exception: The function's own error on that element.
    """
    # Here, not above: planning knows the rewrites, some of these know maps, and a map asks for its spec here.
    from raydist.pipelines.run.plan import open_iterator

    iterator = open_iterator(op, seed=0, epoch=0, options=merged_options(op), executor=InlineExecutor())
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
