"""The rows of a batch that is one element, for `unbatch` and for Arrow tables."""

from __future__ import annotations

from typing import Any

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.elements.blocks import Block, object_column
from raydist.pipelines.elements.object_leaves import ListLeaf
from raydist.pipelines.elements.rows import stack_leaves
from raydist.pipelines.elements.spec import ObjectSpec, RaggedSpec, TensorSpec


def row_spec(spec: TensorSpec) -> TensorSpec:
    """Return the spec of one row of a leaf.

    Raises:
        InvalidArgumentError: The leaf has no first dimension.
        SpecError: The leaf is neither a tensor nor a list of tensors.
    """
    _require_tensors(spec)
    if spec.shape == ():
        raise InvalidArgumentError(f"unbatch needs elements with a first dimension to split, got {spec}.")
    return TensorSpec(None if spec.shape is None else spec.shape[1:], spec.dtype)


def _require_tensors(spec: TensorSpec) -> None:
    if isinstance(spec, ObjectSpec) and not isinstance(spec, RaggedSpec):
        raise spec.refused("unbatch")


def rows_of_batch(batch: Block) -> Block:
    """Return the rows of one element as a block.

    Raises:
        InvalidArgumentError: A leaf has no first dimension, or first dimensions differ.
        SpecError: A leaf is neither a tensor nor a list of tensors.
    """
    for spec in batch.specs:
        _require_tensors(spec)
    leaves = [_entries(column[0]) for column in batch.columns]
    shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
    lengths = [shape[0] for shape in shapes if shape]
    if len(lengths) < len(leaves) or len(set(lengths)) > 1:
        raise InvalidArgumentError(f"The leaves of a batch must share their first dimension, got shapes {shapes}.")
    return Block(batch.structure, tuple(map(row_spec, batch.specs)), tuple(leaves), lengths[0])


def _entries(leaf: Any) -> Any:
    """Return the entries of a list of tensors as a column; any other leaf itself."""
    if not isinstance(leaf, ListLeaf):
        return leaf
    return stack_leaves(leaf.entries, set(map(type, leaf.entries)))[0] if leaf.entries else object_column([])
