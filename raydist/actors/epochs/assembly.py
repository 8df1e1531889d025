"""Assembly of a replica's rows where they are stored, for replicas on several nodes.

A shuffled batch has rows of many blocks. If each replica mapped these blocks, they would all travel to every node. So
an input worker on the node of some blocks copies the rows for one replica into a new block, and only that travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast, final

import numpy as np

from raydist.actors.workers.result_recipes import node_of
from raydist.core.nest import flatten
from raydist.pipelines.elements.blocks import Block, concat_blocks
from raydist.pipelines.elements.columns import Column, RemoteColumn, concat_columns
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.compaction import CopyRows
from raydist.pipelines.engine.executor import Pending
from raydist.pipelines.engine.kernel import StageSpec

_MOST_TIMES = 2.0


class RunsOnNodes(Protocol):
    """The part of a pool of workers that an assembly uses."""

    def submit_on(self, node: str, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        """Send a block to a worker on a node, or to any if none runs there."""


def is_worth_a_copy(column: RemoteColumn) -> bool:
    """Return True if the blocks with these rows are more than twice as large as the rows."""
    named = [column.stored[number] for number in np.unique(column.numbers).tolist()]
    return sum(each.row_bytes * each.shape[0] for each in named) > _MOST_TIMES * column.nbytes


def rows_by_node(column: RemoteColumn, node_of_number: Callable[[int], str]) -> dict[str, np.ndarray]:
    """Return the rows of a column by the node of their blocks, in order."""
    numbers, kinds = np.unique(column.numbers, return_inverse=True)
    nodes = [node_of_number(number) for number in numbers.tolist()]
    names = list(dict.fromkeys(nodes))
    of_rows = np.array([names.index(node) for node in nodes])[kinds]
    return {name: np.flatnonzero(of_rows == index) for index, name in enumerate(names)}


@final
class Assembly:
    """Copies of rows by the workers of a pool.

    Args:
        pool: Runs the copies.
        name: Name of the epoch, for messages.
    """

    def __init__(self, pool: RunsOnNodes, name: str) -> None:
        self._pool = pool
        self._spec = StageSpec("assembly", (CopyRows(f"the assembly of batches of {name}"),))

    def begin(self, columns: Sequence[Column]) -> Callable[[], list[Column]]:
        """Start to copy columns of equal length that hold row ids, where that is worth it.

        Returns:
            A function that waits for the copies and returns the columns.
        """
        places = [place for place, column in enumerate(columns) if _may_be_copied(column)]
        if not places:
            return lambda: list(columns)
        rows = [cast(RemoteColumn, columns[place]) for place in places]
        largest = max(rows, key=lambda column: column.nbytes)
        by_node = rows_by_node(largest, lambda number: node_of(largest.stored[number]))
        underway = [
            self._pool.submit_on(node, self._spec, _block([c[at] for c in rows]), (0,)) for node, at in by_node.items()
        ]
        order = np.argsort(np.concatenate(list(by_node.values())))

        def finish() -> list[Column]:
            made = [_copied(work) for work in underway]
            found = list(columns)
            for index, place in enumerate(places):
                found[place] = concat_columns([block.columns[index] for block in made], np.concatenate)[order]
            return found

        return finish


def _may_be_copied(column: Column | RemoteColumn) -> bool:
    return isinstance(column, RemoteColumn) and column.ids.ndim == 1 and len(column) > 0 and is_worth_a_copy(column)


def _block(columns: Sequence[RemoteColumn]) -> Block:
    specs = tuple(TensorSpec(column.row_shapes[0], column.dtype) for column in columns)
    return Block(flatten(specs)[1], specs, tuple(cast(Sequence[Column], columns)), len(columns[0]))


def _copied(work: Pending) -> Block:
    """Return the copied rows: several blocks where a worker died meanwhile."""
    blocks = []
    for item in work.result().items:
        if not isinstance(item, Block):
            raise item.error
        blocks.append(item)
    return concat_blocks(blocks)
