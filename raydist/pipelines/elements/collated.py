"""Batches of a user's `collate` function, which runs last, separately for each replica's part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

from raydist.core.exception_utils import annotate
from raydist.core.nest import NOTHING, map_structure
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.convert import torch_rows
from raydist.pipelines.elements.functions import function_label
from raydist.pipelines.elements.items import count_items, drop_items, keep_items
from raydist.pipelines.elements.object_leaves import Box, FromNumpy, ObjectLeaf, boxed, handed_out, without_tensors
from raydist.pipelines.elements.spec import refused_collated


@final
@dataclass(frozen=True, slots=True, eq=False)
class CollatedLeaf(ObjectLeaf):
    """Elements, and the function that makes a batch from them."""

    blocks: tuple[Block, ...]
    collate: Callable[[list[Any]], Any]

    @property
    def num_rows(self) -> int:
        return count_items(self.blocks)

    def cut(self, start: int, stop: int) -> CollatedLeaf:
        kept = drop_items(keep_items(self.blocks, stop), start)
        blocks = tuple(block for block in kept if isinstance(block, Block) and block.num_rows)
        return CollatedLeaf(blocks, self.collate)

    def for_functions(self) -> NoReturn:
        raise refused_collated("a function")

    def for_users(self, from_numpy: FromNumpy) -> Any:
        return handed_out(self.result(), from_numpy)

    def in_pieces(self) -> Box:
        return Box(without_tensors(self.result()), "made")

    def result(self) -> Any:
        """Return the batch from the function."""
        from torch import from_numpy  # torch is imported only when a tensor is made

        elements = [row for block in self.blocks for row in torch_rows(block, from_numpy)]
        try:
            return self.collate(elements)
        except Exception as error:
            annotate(error, f"In the collate function {function_label(self.collate)} for {len(elements)} elements.")
            raise


def pieces_of_results(leaves: Sequence[CollatedLeaf]) -> list[Any]:
    """Return each replica's batch as a nest of boxes. All nests have the structure that all results share.

    Dicts, namedtuples and a tuple at the top are nests if they have the same keys, or length, on all replicas. Anything
    else, such as a list or an inner tuple, is one leaf. A replica without elements gets the structure of the last of
    `leaves`, without rows.
    """
    boxes = [leaf.in_pieces() if leaf.num_rows else None for leaf in leaves]
    values = [(boxes[-1] or Box(None, "made")).value if box is None else box.value for box in boxes]
    nests = _spread(values, is_top=True)
    return [
        nest if leaf.num_rows else map_structure(_without_rows, nest, none=NOTHING)
        for nest, leaf in zip(nests, leaves, strict=True)
    ]


def _without_rows(array: Any) -> Any:
    return boxed(array.item().first(0))


def _spread(values: Sequence[Any], *, is_top: bool) -> list[Any]:
    """Return one nest per value, with an array that holds a box in place of each leaf."""
    first = values[0]
    if all(value is None for value in values):
        return list(values)
    if isinstance(first, Mapping) and all(
        isinstance(value, Mapping) and value.keys() == first.keys() for value in values
    ):
        columns = {key: _spread([value[key] for value in values], is_top=False) for key in first}
        return [{key: column[number] for key, column in columns.items()} for number in range(len(values))]
    if isinstance(first, tuple) and (is_top or hasattr(first, "_fields")) and _are_alike(values):
        rows = zip(*(_spread(column, is_top=False) for column in zip(*values, strict=True)), strict=True)
        return [type(first)(*row) if hasattr(first, "_fields") else row for row in rows] if first else list(values)
    return [boxed(Box(value, "made")) for value in values]


def _are_alike(values: Sequence[Any]) -> bool:
    return len({(type(value), len(value) if isinstance(value, tuple) else -1) for value in values}) == 1
