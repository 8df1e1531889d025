"""The rows of a batch that is one element: what `unbatch` hands out, and how batches become Arrow tables."""

from __future__ import annotations

from raydist.errors import InvalidArgumentError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.spec import TensorSpec

__all__ = ["row_spec", "rows_of_batch"]


def row_spec(spec: TensorSpec) -> TensorSpec:
    """The spec of one row of a leaf.

    Raises:
        InvalidArgumentError: The leaf has no first dimension.
    """
    if spec.shape == ():
        raise InvalidArgumentError(f"unbatch needs elements with a first dimension to split, got {spec}.")
    return TensorSpec(None if spec.shape is None else spec.shape[1:], spec.dtype)


def rows_of_batch(batch: Block) -> Block:
    """The rows of one element as a block.

    Raises:
        InvalidArgumentError: A leaf has no first dimension, or first dimensions differ.
    """
    leaves = [column[0] for column in batch.columns]
    shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
    lengths = [shape[0] for shape in shapes if shape]
    if len(lengths) < len(leaves) or len(set(lengths)) > 1:
        raise InvalidArgumentError(f"The leaves of a batch must share their first dimension, got shapes {shapes}.")
    return Block(batch.structure, tuple(map(row_spec, batch.specs)), tuple(leaves), lengths[0])
