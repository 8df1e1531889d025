"""Rows of blocks on several nodes become one block a node for each replica; order and values stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.actors.epochs import assembly
from raydist.actors.epochs.assembly import Assembly, is_worth_a_copy, rows_by_node
from raydist.actors.epochs.piece import pack_piece
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import Column, RemoteColumn, StoredColumn, concat_columns, in_memory
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.engine.executor import Pending
from raydist.pipelines.engine.kernel import StageSpec
from tests.pipelines.storing_executor import InStore, StoringExecutor


class Pool:
    """Runs blocks here, and notes on which node they were to run."""

    def __init__(self) -> None:
        self.nodes: list[str] = []

    def submit_on(self, node: str, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        self.nodes.append(node)
        return StoringExecutor().submit(spec, block, starts)


def columns_of(num_blocks: int, rows: np.ndarray[Any, Any]) -> list[Column]:
    """Two columns of some rows of blocks of ten rows each."""
    made = []
    for width in (3, 1):
        blocks = [np.arange(10.0)[:, None] * np.ones(width) + 10 * k for k in range(num_blocks)]
        parts = [cast(Column, RemoteColumn.of(InStore.put(block))) for block in blocks]
        made.append(concat_columns(parts, np.concatenate)[rows])
    return made


def node_of(stored: StoredColumn) -> str:
    return f"node-{int(stored.load()[0, 0]) // 10 % 3}"


@pytest.fixture(autouse=True)
def nodes_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "node_of", node_of)


@given(data=st.data())
def test_rows_and_order_stay(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 6))
    rows = np.array(data.draw(st.lists(st.integers(0, 10 * num_blocks - 1), min_size=1, max_size=30)))
    columns = [*columns_of(num_blocks, rows), np.arange(len(rows))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "_MOST_TIMES", data.draw(st.sampled_from([0.0, 2.0])))
        found = Assembly(Pool(), "an epoch").begin(columns)()
    for mine, theirs in zip(found, columns, strict=True):
        assert np.array_equal(in_memory(mine), in_memory(theirs))


def test_one_copy_a_node() -> None:
    pool = Pool()
    columns = columns_of(6, np.array([0, 11, 22, 33, 44, 55]))
    Assembly(pool, "an epoch").begin(columns)()
    assert pool.nodes == ["node-0", "node-1", "node-2"]


class Split(Pending):
    """The result of a block whose worker died: row by row."""

    def __init__(self, whole: Pending) -> None:
        self._whole = whole

    def result(self) -> StageResult:
        found = self._whole.result()
        (block,) = cast(tuple[Block], found.items)
        return replace(found, items=tuple(block.slice(row, row + 1) for row in range(block.num_rows)))


class DyingPool(Pool):
    def submit_on(self, node: str, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        return Split(super().submit_on(node, spec, block, starts))


def test_a_worker_may_die_meanwhile() -> None:
    columns = columns_of(6, np.array([0, 55, 11, 1, 22, 33]))
    found = Assembly(DyingPool(), "an epoch").begin(columns)()
    for mine, theirs in zip(found, columns, strict=True):
        assert np.array_equal(in_memory(mine), in_memory(theirs))


def test_a_group_holds_the_blocks_of_its_row_ids() -> None:
    ids, values = columns_of(1000, np.arange(10_000))[0], np.zeros((10_000, 3))
    assert not pack_piece([(ids,)], ["x"]).is_worth_a_put
    assert not pack_piece([(ids, values)], ["x", "y"]).is_worth_a_put
    assert pack_piece([(values,)], ["y"]).is_worth_a_put


def test_rows_that_are_most_of_their_blocks_are_not_copied() -> None:
    pool = Pool()
    columns = columns_of(2, np.arange(15))
    assert Assembly(pool, "an epoch").begin(columns)() == columns
    assert not pool.nodes
    assert [is_worth_a_copy(cast(RemoteColumn, column)) for column in columns_of(3, np.arange(0, 30, 3))] == [True] * 2


def test_rows_by_node() -> None:
    column = cast(RemoteColumn, columns_of(4, np.array([30, 0, 10, 1]))[0])
    nodes = rows_by_node(column, lambda number: node_of(column.stored[number]))
    assert {node: rows.tolist() for node, rows in nodes.items()} == {"node-0": [0, 1, 3], "node-1": [2]}
