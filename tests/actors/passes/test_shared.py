from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from raydist.actors.passes.link import InputHost
from raydist.actors.passes.piece import BatchPiece
from raydist.actors.passes.shared import SharedPiece, share_piece
from raydist.actors.workers.mapped_results import MappedResults
from raydist.actors.workers.pool import ActorExecutor
from raydist.dataset import Dataset
from raydist.distributed_dataset import InputSide, distribute
from raydist.options import InputOptions, Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from tests.pipelines.engine.stages import block_of, spec_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

ROWS = np.arange(60_000, dtype=np.int32).reshape(6, 10_000)


@pytest.fixture
def result() -> tuple[Any, StageResult]:
    """A result in the object store, and as it is mapped here."""
    block = block_of(Dataset.from_tensor_slices((ROWS, ROWS.astype(np.float64))))
    ref = ray.put(StageResult((block,), (6,), ("",)))
    return ref, ray.get(ref)


def refuse(piece: BatchPiece) -> Any:
    raise AssertionError(f"{piece} should not have been stored")


def piece_of(result: StageResult, rows: slice) -> BatchPiece:
    block = result.items[0]
    assert isinstance(block, Block)
    return BatchPiece(tuple(column[rows] for column in block.columns), len(block.columns[0][rows]))


def test_a_part_of_a_result_is_handed_on_without_storing_it(result: tuple[Any, StageResult]) -> None:
    mapped = MappedResults()
    mapped.remember(*result)
    piece = piece_of(result[1], slice(2, 5))
    shared = share_piece(mapped, refuse, piece)
    assert isinstance(shared, SharedPiece)
    sent = pickle.dumps(ray.get(ray.put([shared])))  # small: it holds no data
    assert len(sent) < 2_000
    arrived = ray.get(ray.put([shared]))[0]
    assert arrived.leaf(0).tolist() == ROWS[2:5].tolist()
    assert arrived.leaf(1).dtype.is_floating_point
    fetched = arrived.fetch(10.0)
    assert fetched.num_rows == 3
    assert not fetched.array(0).flags.writeable, "it is the object store's memory"


def test_a_turned_part_keeps_its_strides(result: tuple[Any, StageResult]) -> None:
    mapped = MappedResults()
    mapped.remember(*result)
    part = piece_of(result[1], slice(1, 4))
    turned = BatchPiece(tuple(part.array(index).T[::2] for index in range(2)), 3)
    shared = share_piece(mapped, refuse, turned)
    assert shared.leaf(0).tolist() == ROWS[1:4].T[::2].tolist()


def test_what_is_no_part_of_one_result_is_stored(result: tuple[Any, StageResult]) -> None:
    mapped = MappedResults()
    mapped.remember(*result)
    whole = piece_of(result[1], slice(0, 6))
    mixed = BatchPiece((whole.columns[0], np.zeros(3)), 6)
    copied = BatchPiece(tuple(np.array(column) for column in whole.columns), 6)
    assert [share_piece(mapped, lambda piece: "stored", piece) for piece in (mixed, copied)] == ["stored"] * 2


def test_a_pool_remembers_what_its_workers_made() -> None:
    pool = ActorExecutor(1)
    try:
        dataset = Dataset.from_tensor_slices(ROWS).map(lambda x: x + 1)
        made = pool.submit(spec_of(dataset), block_of(Dataset.from_tensor_slices(ROWS)), (0,)).result()
        shared = share_piece(pool.mapped, refuse, piece_of(made, slice(0, 2)))
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
        assert all(isinstance(ref, SharedPiece) for batch in batches for ref in batch.batch.refs)
