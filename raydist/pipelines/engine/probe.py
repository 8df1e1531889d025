"""Inference of a function's result spec: run the function on the first elements."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from raydist.core.errors import FailedPreconditionError
from raydist.core.nest import Structure, unflatten
from raydist.pipelines.elements.blocks import Column
from raydist.pipelines.elements.spec import DatasetSpec, TensorSpec, most_specific_common
from raydist.pipelines.engine.build import plan_as_written, start
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.op import DatasetOp, merged_options
from raydist.pipelines.engine.op_iterator import OpIterator

PROBED_ELEMENTS = 3  # elements to look at at most
QUICK_S = 0.2  # seconds after which no further element is read

Specs = tuple[Sequence[TensorSpec], Structure]
"""The leaves of a nest of specs, and the structure of the nest."""


def open_probe(op: DatasetOp) -> OpIterator:
    """Return one pass over `op` in the caller's thread, to look at first elements. The graph runs without rewrites."""
    plan = plan_as_written(op, merged_options(op))
    return start(plan, plan_as_written, seed=0, epoch=0, executor=InlineExecutor())


def probe_spec(op: DatasetOp) -> Any:
    """Return the nest of TensorSpec of the first elements of `op`. A dimension in which they differ is None.

    At most three elements are read, and only within 0.2 s. Later elements may differ.

    Raises:
        FailedPreconditionError: The dataset is empty.
        Exception: The function's own error on the first element.
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
    except Exception:  # an error after the first element does not matter here
        if not found:
            raise
    finally:
        iterator.close()
    return merged_specs(found)


def _asked(spec: TensorSpec, column: Column) -> TensorSpec:
    """Return `spec`; for a dataset without known elements, ask the dataset for its element spec."""
    if not isinstance(spec, DatasetSpec) or spec.element_spec is not None:
        return spec
    try:
        return DatasetSpec(column[0].element_spec)
    except FailedPreconditionError:  # a dataset that may be empty
        return spec


def merged_specs(found: Sequence[Specs]) -> Any:
    """Return the nest of specs that covers all of `found` with the structure and dtypes of the first spec."""
    specs, structure = found[0]
    for others, other in found[1:]:
        merged = [most_specific_common(mine, theirs) for mine, theirs in zip(specs, others, strict=False)]
        if other == structure and None not in merged:
            specs = [spec for spec in merged if spec is not None]
    return unflatten(structure, specs)
