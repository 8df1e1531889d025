from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from raydist.actors.passes.input_host import InputHost
from raydist.actors.passes.piece import GroupPiece
from raydist.actors.passes.shared import OnePiece, SharedPiece, SharedPieces, share_step
from raydist.actors.workers.mapped_results import MappedResults
from raydist.actors.workers.pool import ActorExecutor
from raydist.dataset import Dataset
from raydist.distributed_dataset import InputSide, distribute
from raydist.options import InputOptions, Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.run.split import Cut
from tests.pipelines.engine.toy_stages import block_of, spec_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

ROWS = np.arange(60_000, dtype=np.int32).reshape(6, 10_000)


@pytest.fixture
def result() -> tuple[Any, StageResult]:
    """A result in the object store, and as it is mapped here."""
    block = block_of(Dataset.from_tensor_slices((ROWS, ROWS.astype(np.float64))))
    ref = ray.put(StageResult((block,), (6,), ("",)))
    return ref, ray.get(ref)


def cut_of(result: StageResult, rows: slice) -> Cut:
    block = result.items[0]
    assert isinstance(block, Block)
    return Cut(tuple(column[rows] for column in block.columns), len(block.columns[0][rows]))


def share(mapped: MappedResults, *cuts: Cut) -> tuple[OnePiece, ...] | None:
    return share_step(mapped, cuts, [str(index) for index in range(len(cuts[0].columns))], zero_copy=False)


def share_one(mapped: MappedResults, cut: Cut) -> SharedPiece:
    pieces = share(mapped, cut)
    assert pieces is not None
    (piece,) = pieces
    assert isinstance(piece, SharedPiece)
    return piece


def test_a_part_of_a_result_is_handed_on_without_storing_it(result: tuple[Any, StageResult]) -> None:
    mapped = MappedResults()
    mapped.remember(*result)
    shared = SharedPieces((share_one(mapped, cut_of(result[1], slice(2, 5))),))
    sent = pickle.dumps(ray.get(ray.put([shared])))  # small: it holds no data
    assert len(sent) < 2_000
    arrived = ray.get(ray.put([shared]))[0]
    assert arrived.leaf(0).tolist() == ROWS[2:5].tolist()
    assert arrived.leaf(1).dtype.is_floating_point
    (fetched,) = arrived.pieces
    assert len(fetched.array(0)) == 3
    assert not fetched.array(0).flags.writeable, "it is the object store's memory"


def test_a_turned_part_keeps_its_strides(result: tuple[Any, StageResult]) -> None:
    mapped = MappedResults()
    mapped.remember(*result)
    part = cut_of(result[1], slice(1, 4))
    shared = share_one(mapped, Cut(tuple(column.T[::2] for column in part.columns), 3))
    assert shared.leaf(0).tolist() == ROWS[1:4].T[::2].tolist()


def test_steps_of_several_results_go_together(result: tuple[Any, StageResult]) -> None:
    mapped = MappedResults()
    mapped.remember(*result)
    other = StageResult((block_of(Dataset.from_tensor_slices((-ROWS, ROWS.astype(np.float64)))),), (6,), ("",))
    ref = ray.put(other)
    other = ray.get(ref)
    mapped.remember(ref, other)
    steps = [share_one(mapped, cut_of(found, slice(0, 2))) for found in (result[1], other)]
    arrived = ray.get(ray.put([SharedPieces(tuple(steps))]))[0]
    assert arrived.leaf(0, 0).tolist() == ROWS[:2].tolist()
    assert arrived.leaf(0, 1).tolist() == (-ROWS[:2]).tolist()


def test_small_pieces_beside_shared_ones_travel_with_them(result: tuple[Any, StageResult]) -> None:
    mapped = MappedResults()
    mapped.remember(*result)
    empty = cut_of(result[1], slice(0, 0))
    pieces = share(mapped, cut_of(result[1], slice(0, 2)), empty)
    assert pieces is not None
    assert [type(piece) for piece in pieces] == [SharedPiece, GroupPiece]
    narrow = tuple(column[:2, :10] for column in cut_of(result[1], slice(0, 2)).columns)
    pieces = share(mapped, cut_of(result[1], slice(0, 2)), Cut(tuple(column[:0] for column in narrow), 0, narrow))
    assert pieces is not None
    assert SharedPieces((pieces[1],)).leaf(0, 1).tolist() == ROWS[:2, :10].tolist()
    assert SharedPieces((pieces[1],)).leaf(0).tolist() == []
    assert share(mapped, empty) is None, "to store it saves a fetch"


def test_what_is_no_part_of_one_result_is_stored(result: tuple[Any, StageResult]) -> None:
    mapped = MappedResults()
    mapped.remember(*result)
    whole = cut_of(result[1], slice(0, 6))
    mixed = Cut((whole.columns[0], np.zeros(3)), 6)
    copied = Cut(tuple(np.array(column) for column in whole.columns), 6)
    assert [share(mapped, cut) for cut in (mixed, copied)] == [None] * 2
    assert share(mapped, whole, copied) is None, "all of a step is stored then"


def test_a_pool_remembers_what_its_workers_made() -> None:
    pool = ActorExecutor(1)
    try:
        dataset = Dataset.from_tensor_slices(ROWS).map(lambda x: x + 1)
        made = pool.submit(spec_of(dataset), block_of(Dataset.from_tensor_slices(ROWS)), (0,)).result()
        shared = share_one(pool.mapped, cut_of(made, slice(0, 2)))
        assert shared.leaf(0).tolist() == (ROWS[:2] + 1).tolist()
    finally:
        pool.close()


@pytest.fixture
def host() -> Iterator[InputHost]:
    host = InputHost("test", num_replicas=2, timeouts=Timeouts(poll_s=1.0))
    yield host
    host.close()


@pytest.mark.parametrize("mapped_last", [True, False])
def test_batches_that_workers_made_are_not_stored_again(host: InputHost, mapped_last: bool) -> None:
    dataset = Dataset.from_tensor_slices(ROWS)
    if mapped_last:
        dataset = dataset.batch(4).map(lambda x: x + 1)
    else:
        dataset = dataset.map(lambda x: x + 1).batch(4)
    side = InputSide(host, 2, Timeouts(poll_s=1.0), drain=lambda: None)
    batches = list(distribute(dataset, side, InputOptions(num_input_workers=1)))
    found = [part.tolist() for batch in batches for part in batch.values]
    assert found == [(ROWS[at : at + size] + 1).tolist() for at, size in ((0, 2), (2, 2), (4, 1), (5, 1))]
    if mapped_last:
        refs = [ref for batch in batches for ref in batch.batch.group.refs]
        assert all(isinstance(ref, SharedPieces) for ref in refs)
        assert all(isinstance(piece, SharedPiece) for ref in refs for piece in ref.pieces)
