"""Datasets as elements: their random choices follow from the element that a function made them of."""

from __future__ import annotations

from collections.abc import Sequence

from raydist.pipelines.elements.blocks import Block, Column, object_column
from raydist.pipelines.elements.items import Item, size_of
from raydist.pipelines.elements.seeds import RandomKey
from raydist.pipelines.elements.spec import DatasetSpec

__all__ = ["with_seeds"]


def with_seeds(items: Sequence[Item], start: int, key: RandomKey) -> list[Item]:
    """`items`, whose datasets have a seed each, drawn from `key` for the number of their element, from `start` on."""
    seeded: list[Item] = []
    for item in items:
        seeded.append(_seeded(item, start, key) if isinstance(item, Block) and item.holds_datasets else item)
        start += size_of(item)
    return seeded


def _seeded(block: Block, start: int, key: RandomKey) -> Block:
    seeds = [int(word >> 1) for word in key.words(start, block.num_rows).tolist()]
    columns = [
        _with_column_seeds(column, seeds) if isinstance(spec, DatasetSpec) else column
        for column, spec in zip(block.columns, block.specs, strict=True)
    ]
    return Block(block.structure, block.specs, tuple(columns), block.num_rows)


def _with_column_seeds(column: Column, seeds: Sequence[int]) -> Column:
    return object_column([dataset._with_element_seed(seed) for dataset, seed in zip(column, seeds, strict=True)])
