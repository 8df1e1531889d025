"""Groups of steps, and the assembly of their rows on the nodes that store them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.actors.epochs import epoch_producer
from raydist.actors.epochs.batch_group import MadeStep, OpenGroup, StepBatch
from raydist.actors.epochs.epoch_producer import Assembly, is_worth_a_copy
from raydist.actors.epochs.piece import GroupPiece, pack_piece
from raydist.core.nest import LEAF, flatten
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import Column, RemoteColumn, StoredColumn, as_remote, concat_columns, in_memory
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.elements.object_leaves import WholeLeaf
from raydist.pipelines.engine.executor import Pending
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.run.split import cut_batch, deal
from tests.pipelines.storing_executor import InStore, StoringExecutor


def made(step: int, *leaves: Any, replicas: int = 1, structure: Any = None) -> MadeStep:
    nest = LEAF if len(leaves) == 1 else flatten(leaves)[1]
    cuts, _ = cut_batch(leaves, num_replicas=replicas, rule="per_batch", step=step, structure=nest)
    return MadeStep(step, cuts, structure or nest, {"after": step + 1})


def filled(*steps: MadeStep, most_bytes: int = 1 << 30) -> OpenGroup:
    group = OpenGroup(most_bytes)
    for step in steps:
        assert group.accepts(step.kind(), step.sizes())
        group.add(step, step.kind(), step.sizes())
    return group


def accepts(group: OpenGroup, step: MadeStep) -> bool:
    return group.accepts(step.kind(), step.sizes())


def test_a_group_puts_each_replica_s_pieces_once() -> None:
    stored: list[GroupPiece] = []

    def put(piece: GroupPiece) -> Any:
        stored.append(piece)
        return len(stored) - 1

    rows = np.arange(2).repeat(10_000).reshape(2, 10_000)
    group = filled(made(5, rows, replicas=3), made(6, rows + 10, replicas=3)).store(put, zero_copy=False)
    assert group.refs == (0, 1, 2)  # the third holds the stand-ins
    assert (group.step, group.rows) == (5, ((1, 1, 0), (1, 1, 0)))
    first, second = StepBatch(group, 0), StepBatch(group, 1)
    assert (first.step, second.step, second.rows) == (5, 6, (1, 1, 0))
    assert [piece.array(0, 1)[:, 0].tolist() for piece in stored] == [[10], [11], []]
    assert [second.place_on(rank, padding=True) for rank in range(3)] == [1, 1, 3]
    assert second.place_on(2, padding=False) == 1
    assert stored[2].array(0, first.place_on(2, padding=True))[:, 0].tolist() == [0, 1]
    assert stored[2].array(0, 3)[:, 0].tolist() == [10, 11]
    assert group.only(1).refs == (None, 1, None)


def test_small_pieces_travel_with_their_group_and_row_ids_are_not_stored_again() -> None:
    def store(group: OpenGroup) -> Any:
        return group.store(lambda piece: "stored", zero_copy=False).refs[0]

    small = np.zeros((1, 1000))
    assert isinstance(store(filled(made(0, small))), GroupPiece)
    assert store(filled(made(0, np.zeros((40, 1000))))) == "stored"
    assert store(filled(*(made(step, small) for step in range(10)))) == "stored", "together they are large"
    rows = np.arange(90_000.0).reshape(10, 9_000)
    column = as_remote(rows)
    group = filled(*(made(n, cast(Any, column[5 * n : 5 * n + 5])) for n in range(2)))
    assert not accepts(group, made(2, rows[:5]))
    piece = store(group)
    assert [piece.array(0, place).tolist() for place in range(2)] == [rows[:5].tolist(), rows[5:].tolist()]


def test_only_like_steps_go_together() -> None:
    rows = np.zeros((4, 3), np.float32)
    group = filled(made(0, rows))
    assert accepts(group, made(1, rows[:1]))  # fewer rows, as at the end of the data
    assert accepts(group, made(1, rows[:0]))
    assert not accepts(group, made(1, np.zeros((4, 2), np.float32)))
    assert not accepts(group, made(1, rows.astype(np.float64)))
    assert not accepts(group, made(1, rows, structure=flatten((1,))[1]))
    text = filled(made(0, np.array(["a", "b"], object)))
    assert accepts(text, made(1, np.array(["c"], object)))
    assert not accepts(text, made(1, np.array([b"c"], object)))


def test_a_group_is_bounded_by_its_largest_piece() -> None:
    rows = np.zeros((3, 1000), np.uint8)
    group = filled(made(0, rows, replicas=2), most_bytes=3999)  # 2000 bytes and 1000
    assert (group.num_bytes, group.is_full) == (3000, False)
    assert not accepts(group, made(1, rows, replicas=2))
    assert accepts(group, made(1, rows[:1], replicas=2))
    assert filled(made(0, rows), most_bytes=10).is_full, "a large one goes alone"


def test_a_step_with_other_leaves_than_rows_goes_alone() -> None:
    for odd in (
        made(0, np.zeros((4, 3)), WholeLeaf(np.zeros(3))),
        MadeStep(0, deal([[np.float32(1)], [np.float32(2)]])[0], LEAF, {}),
        MadeStep(0, deal([[np.zeros((2, 3))], [np.zeros((2, 4))]])[0], LEAF, {}),
    ):
        group = filled(odd)
        assert group.is_full
        assert not accepts(group, odd)
        assert not accepts(filled(made(0, np.zeros((4, 3)), replicas=len(odd.cuts))), odd)
        assert len(group.store(lambda piece: "stored", zero_copy=False).rows) == 1


# --- assembly of rows on the nodes that store them --------------------------------------------------------------------


class Pool:
    """Run blocks in this process, and record the node of each block."""

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
        made.append(concat_columns(parts)[rows])
    return made


def node_of(stored: StoredColumn) -> str:
    return f"node-{int(stored.load()[0, 0]) // 10 % 3}"


@pytest.fixture(autouse=True)
def nodes_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_producer, "node_of", node_of)


def assemble(pool: Pool, columns: list[Column]) -> list[Column]:
    """Put the rows together, and compare them with those that were given."""
    found = Assembly(cast(Any, pool), "an epoch").begin(columns)()
    for mine, theirs in zip(found, columns, strict=True):
        assert np.array_equal(in_memory(mine), in_memory(theirs))
    return found


@given(data=st.data())
def test_rows_and_order_stay(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 6))
    rows = np.array(data.draw(st.lists(st.integers(0, 10 * num_blocks - 1), min_size=1, max_size=30)))
    columns = [*columns_of(num_blocks, rows), np.arange(len(rows))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epoch_producer, "_MOST_TIMES", data.draw(st.sampled_from([0.0, 2.0])))
        assemble(Pool(), columns)


def test_one_copy_a_node_and_none_of_rows_that_are_most_of_their_blocks() -> None:
    pool = Pool()
    assemble(pool, columns_of(6, np.array([0, 11, 22, 33, 44, 55])))
    assert pool.nodes == ["node-0", "node-1", "node-2"]
    columns = columns_of(2, np.arange(15))
    assert assemble(pool, columns) == columns
    assert len(pool.nodes) == 3
    assert [is_worth_a_copy(cast(RemoteColumn, column)) for column in columns_of(3, np.arange(0, 30, 3))] == [True] * 2


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
    assemble(DyingPool(), columns_of(6, np.array([0, 55, 11, 1, 22, 33])))


def test_a_group_holds_the_blocks_of_its_row_ids() -> None:
    ids, values = columns_of(1000, np.arange(10_000))[0], np.zeros((10_000, 3))
    assert not pack_piece([(ids,)], ["x"]).is_worth_a_put
    assert not pack_piece([(ids, values)], ["x", "y"]).is_worth_a_put
    assert pack_piece([(values,)], ["y"]).is_worth_a_put
