"""Which steps go together, and what the queues know of them."""

from __future__ import annotations

import pickle
from typing import Any, cast

import numpy as np

from raydist.actors.epochs.batch_group import MadeStep, OpenGroup, StepBatch
from raydist.actors.epochs.piece import GroupPiece
from raydist.core.nest import LEAF, flatten
from raydist.pipelines.elements.columns import as_remote
from raydist.pipelines.elements.object_leaves import WholeLeaf
from raydist.pipelines.run.split import cut_batch, deal


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


def test_small_pieces_travel_with_their_group() -> None:
    small, large = np.zeros((4, 1000)), np.zeros((40, 1000))
    assert isinstance(filled(made(0, small[:1])).store(len, zero_copy=False).refs[0], GroupPiece)  # type: ignore[arg-type]  # never called
    assert filled(made(0, large)).store(lambda piece: "stored", zero_copy=False).refs == ("stored",)
    many = filled(*(made(step, small[:1]) for step in range(10)))
    assert many.store(lambda piece: "stored", zero_copy=False).refs == ("stored",), "together they are large"


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


def test_a_group_is_bounded_by_its_largest_piece() -> None:
    rows = np.zeros((3, 1000), np.uint8)
    group = filled(made(0, rows, replicas=2), most_bytes=3999)  # 2000 bytes and 1000
    assert (group.num_bytes, group.is_full) == (3000, False)
    assert not accepts(group, made(1, rows, replicas=2))
    assert accepts(group, made(1, rows[:1], replicas=2))
    assert filled(made(0, rows), most_bytes=3000).is_full
    large = filled(made(0, rows), most_bytes=10)
    assert large.is_full  # alone, whatever its size


def test_one_row_of_300_mb_goes_alone_and_is_not_copied() -> None:
    row = np.zeros((1, 300 << 20), np.uint8)
    group = filled(made(0, row), most_bytes=4 << 20)
    assert group.is_full
    assert not accepts(group, made(1, row))
    assert not accepts(filled(made(0, row[:, :10]), most_bytes=4 << 20), made(1, row))
    stored: list[GroupPiece] = []
    group.store(stored.append, zero_copy=True)
    assert np.shares_memory(stored[0].array(0), row)
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(stored[0], protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) == row.nbytes
    assert all(np.shares_memory(np.frombuffer(buffer.raw(), np.uint8), row) for buffer in buffers)


def test_states_are_those_after_each_step() -> None:
    group = filled(made(3, np.zeros(2)), made(4, np.zeros(2)))
    assert group.states == ({"after": 4}, {"after": 5})


def test_row_ids_are_not_stored_again() -> None:
    rows = np.arange(90_000.0).reshape(10, 9_000)
    column = as_remote(rows)
    steps = [made(n, cast(Any, column[5 * n : 5 * n + 5])) for n in range(2)]
    group = filled(*steps)
    assert not accepts(group, made(2, rows[:5]))

    def refuse(piece: GroupPiece) -> Any:
        raise AssertionError("it lies in the store already")

    (piece,) = group.store(refuse, zero_copy=False).refs
    assert [piece.array(0, place).tolist() for place in range(2)] == [rows[:5].tolist(), rows[5:].tolist()]
