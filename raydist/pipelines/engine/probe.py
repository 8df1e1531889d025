"""Finding out what a function returns, by running it on first elements."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from raydist.errors import FailedPreconditionError
from raydist.nest import Structure, unflatten
from raydist.pipelines.elements.blocks import Column
from raydist.pipelines.elements.spec import DatasetSpec, TensorSpec, most_specific_common
from raydist.pipelines.engine.build import plan_as_written, start
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.merged_options import merged_options
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.engine.op_iterator import OpIterator

__all__ = ["PROBED_ELEMENTS", "QUICK_S", "merged_specs", "open_probe", "probe_spec"]

PROBED_ELEMENTS = 3  # as many are looked at to find out what a function returns,
QUICK_S = 0.2  # and no further one after this time

Specs = tuple[Sequence[TensorSpec], Structure]
"""The leaves of a nest of specs, and the nest."""


def open_probe(op: DatasetOp) -> OpIterator:
    """One pass over `op` in the caller's thread, for a look at first elements. The graph is run as it is written."""
    plan = plan_as_written(op, merged_options(op))
    return start(plan, plan_as_written, seed=0, epoch=0, executor=InlineExecutor())


def probe_spec(op: DatasetOp) -> Any:
    """Nest of TensorSpec of the first elements of `op`: a dimension in which they differ is None.

    At most three are looked at, and only while that is quick; what follows need not be like them.

    Raises:
        FailedPreconditionError: There is no first element.
        Exception: The function's own error on that element.
    """
    found: list[Specs] = []
    deadline = time.monotonic() + QUICK_S
    iterator = open_probe(op)
    try:
        while not found or (len(found) < PROBED_ELEMENTS and time.monotonic() <= deadline):
            block = iterator.next_block(1)
            found.append(([_asked(*leaf) for leaf in zip(block.specs, block.columns, strict=True)], block.structure))
    except StopIteration:
        if not found:
            raise FailedPreconditionError(
                f"The element_spec of {op.label} is found by running it on a first element, and the dataset is empty. "
                "Declare it with output_spec=."
            ) from None
    except Exception:  # behind the first element it tells nothing
        if not found:
            raise
    finally:
        iterator.close()
    return merged_specs(found)


def _asked(spec: TensorSpec, column: Column) -> TensorSpec:
    """`spec`; that of a dataset, if nobody has asked for its elements yet, with them."""
    if not isinstance(spec, DatasetSpec) or spec.element_spec is not None:
        return spec
    try:
        return DatasetSpec(column[0].element_spec)
    except FailedPreconditionError:  # one that may have no elements
        return spec


def merged_specs(found: Sequence[Specs]) -> Any:
    """The nest of what covers `found`, as far as these are of one structure and dtypes: else of the first of them."""
    specs, structure = found[0]
    for others, other in found[1:]:
        merged = [most_specific_common(mine, theirs) for mine, theirs in zip(specs, others, strict=False)]
        if other == structure and None not in merged:
            specs = [spec for spec in merged if spec is not None]
    return unflatten(structure, specs)
