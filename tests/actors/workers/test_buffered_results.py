from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, final

import cloudpickle
import numpy as np
import pytest

from raydist.actors.workers import buffered_results
from raydist.actors.workers.buffered_results import BufferedResult, BufferWriter, write_block, write_result
from raydist.actors.workers.shared_buffers import BufferShelf, SharedBuffer
from raydist.actors.workers.worker import InputWorker, unpack_result
from raydist.dataset import Dataset
from raydist.pipelines.elements import block_parts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, StageResult
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.executor import _Ready as Ready
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.ops import map as map_module
from tests.contracts.datasets import DATASETS
from tests.contracts.op import check_op
from tests.pipelines.engine.toy_stages import block_of, spec_of

MEMORY = 1 << 22


def memory(num_bytes: int = MEMORY) -> np.ndarray[Any, Any]:
    return np.zeros(num_bytes, np.uint8)


def across(items: tuple[Item, ...], room: np.ndarray[Any, Any]) -> StageResult:
    written = write_result(StageResult(items, (len(items),), ("x",), busy_s=0.5), BufferWriter(room))
    assert isinstance(written, BufferedResult)
    return written.read(room)


def image(value: int) -> Block:
    return block_of_rows([np.full((100, 100, 3), value, np.float32)])


def test_large_elements_come_as_one_column_that_can_be_written() -> None:
    room = memory()
    result = across(tuple(map(image, range(5))), room)
    (block,) = result.items
    assert isinstance(block, Block)
    assert (block.num_rows, block.columns[0].shape, block.specs) == (5, (5, 100, 100, 3), image(0).specs)
    assert block.columns[0][:, 99, 99, 2].tolist() == [0, 1, 2, 3, 4]
    assert (result.inputs, result.signatures, result.busy_s) == ((5,), ("x",), 0.5)
    assert np.shares_memory(block.columns[0], room)
    assert block.columns[0].flags.writeable
    assert block.columns[0].__array_interface__["data"][0] % 64 == room.__array_interface__["data"][0] % 64


def test_joined_elements_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    concatenate = np.concatenate

    def counted(parts: Any, out: Any) -> Any:
        copied.append(out.nbytes)
        return concatenate(parts, out=out)

    monkeypatch.setattr(np, "concatenate", counted)
    room = memory()
    written = write_result(StageResult(tuple(map(image, range(5))), (5,), ("",)), BufferWriter(room))
    assert written is not None
    assert copied == [5 * 120_000]
    (place,) = written.places
    assert place == (64, 5 * 120_000), "nothing lies twice in the buffer"
    assert len(written.pickled) < 2_000


def test_errors_and_other_kinds_stay_where_they_are() -> None:
    error = ElementError(ValueError("no"), 2)
    small = block_of(Dataset.range(4))
    words = block_of_rows(["a", "b"])
    items: tuple[Item, ...] = (image(0), image(1), error, image(2), small, words, words, image(3))
    result = across(items, memory())
    kinds = [item.num_rows if isinstance(item, Block) else str(item.error) for item in result.items]
    assert kinds == [2, "no", 1, 4, 2, 2, 1]
    assert [row for item in result.items[4:6] if isinstance(item, Block) for row in item.rows()] == ["a", "b"] * 2


def test_shapes_that_differ_are_not_joined() -> None:
    wide = block_of_rows([np.zeros((100, 200, 3), np.float32)])
    result = across((image(0), wide, wide, image(1)), memory())
    shapes = [item.columns[0].shape for item in result.items if isinstance(item, Block)]
    assert shapes == [(1, 100, 100, 3), (2, 100, 200, 3), (1, 100, 100, 3)]
    ragged = block_of_rows([np.ones(20_000), np.ones(30_000)])
    (block,) = across((ragged,), memory()).items
    assert isinstance(block, Block)
    assert [row.sum() for row in block.columns[0]] == [20_000, 30_000]


def test_little_and_too_much_travel_otherwise() -> None:
    few = StageResult((block_of(Dataset.range(10)),), (10,), ("",))
    assert write_result(few, BufferWriter(memory())) is None
    many = StageResult(tuple(map(image, range(9))), (9,), ("",))
    assert write_result(many, BufferWriter(memory(1 << 20))) is None
    assert write_result(replace(many, items=(*many.items[:8],)), BufferWriter(memory(1 << 20))) is not None
    one = StageResult((block_of_rows([np.zeros(2 << 20, np.uint8)]),), (1,), ("",))
    assert write_result(one, BufferWriter(memory(1 << 20))) is None


def test_a_column_that_was_made_in_the_buffer_stays_there() -> None:
    room = memory()
    writer = BufferWriter(room)
    column = writer.make_column((100, 1 << 10), np.dtype(np.float32))
    assert column is not None
    column[:] = np.arange(100)[:, None]
    block = replace(block_of_rows([column[0]]), columns=(column,), num_rows=100)
    written = write_result(StageResult((block,), (100,), ("",)), writer)
    assert written is not None
    assert written.places == ((64, column.nbytes),)
    (read,) = written.read(room).items
    assert isinstance(read, Block)
    assert read.columns[0][:, 7].tolist() == [*range(100)]


@pytest.mark.skipif(sys.platform != "linux", reason="files without a name are Linux's")
def test_a_worker_makes_the_last_functions_results_in_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    make_column = BufferWriter.make_column

    def counted(self: BufferWriter, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        made.append(shape)
        return make_column(self, shape, dtype)

    monkeypatch.setattr(BufferWriter, "make_column", counted)
    buffer = SharedBuffer.create()
    numbers = Dataset.range(600)
    spec = spec_of(numbers.map(lambda n: np.full(1 << 10, n, np.float32)).map(lambda image: image[:512] + 1))
    pickled = cloudpickle.dumps(spec)
    result = InputWorker("here").run_into(buffer.address, b"", pickled, block_of(numbers), (0, 0))
    assert isinstance(result, BufferedResult)
    assert made == [(600, 512)]
    assert result.places == ((64, 600 * 512 * 4),)
    (read,) = result.read(np.frombuffer(buffer.memory, np.uint8)).items
    assert isinstance(read, Block)
    assert read.columns[0][:, 100].tolist() == [*range(1, 601)]


def test_columns_in_the_buffer_lie_apart_and_small_or_too_large_ones_elsewhere() -> None:
    room = memory()
    writer = BufferWriter(room)
    size = (1 << 16) + 1
    columns = [writer.make_column((size,), np.dtype(np.uint8)) for _ in range(MEMORY // size + 1)]
    made = [column for column in columns if column is not None]
    assert columns[-1] is None
    assert len(made) == len(columns) - 1
    for number, column in enumerate(made):
        column[:] = number
    assert [set(column.tolist()) for column in made] == [{number} for number in range(len(made))]
    assert BufferWriter(memory()).make_column((100,), np.dtype(np.float64)) is None


@final
class ThroughBuffers(Executor):
    """Does at once what a worker would do, and fetches it from a buffer."""

    window = 1

    def __init__(self, shelf: BufferShelf) -> None:
        self._worker = InputWorker("here")
        self._shelf = shelf
        self.buffered = 0

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        lease, given = self._shelf.lease(), self._shelf.lease()
        assert lease is not None
        assert given is not None
        memory = given.open()
        sent = write_block(block, given.address, memory)
        assert sent is not None
        result = self._worker.run_into(lease.address, b"", cloudpickle.dumps(spec), sent, starts)
        assert result is not None
        memory[64:] = 255  # nothing that the worker made lies where the block was
        if isinstance(result, BufferedResult):
            self.buffered += 1
            result = result.read(lease.open())
        return Ready(unpack_result(result))

    def close(self) -> None:
        """Nothing was started."""


@pytest.mark.skipif(sys.platform != "linux", reason="files without a name are Linux's")
@pytest.mark.parametrize("name", DATASETS)
def test_operations_keep_their_contract_through_buffers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffered_results, "_SMALL_BYTES", 0)
    create = SharedBuffer.create
    monkeypatch.setattr(SharedBuffer, "create", lambda: create(1 << 20))
    shelf = BufferShelf(most=1_000)
    monkeypatch.setattr(block_parts, "_PART_BYTES", 16)  # a row or two at a time, each written in the buffer
    monkeypatch.setattr(map_module, "_MANY_ROWS", 2)
    monkeypatch.setattr(map_module, "_FIRST_ROWS", 1)
    check_op(DATASETS[name], limit=9, executors=(lambda options: ThroughBuffers(shelf),))


@dataclass(frozen=True)
class Pair:
    left: Any
    right: Any


def test_nests_of_users_come_back_as_their_own() -> None:
    pairs = tuple(block_of_rows([Pair(np.full(20_000, k), k)]) for k in range(3))
    (block,) = across(pairs, memory()).items
    assert isinstance(block, Block)
    assert block.structure.kind is Pair
    assert [row.right for row in block.rows()] == [0, 1, 2]
    assert block.row(2).left.tolist() == [2] * 20_000


@pytest.mark.skipif(sys.platform != "linux", reason="files without a name are Linux's")
def test_blocks_are_read_only_where_they_are_read() -> None:
    shelf = BufferShelf(most=2)
    lease = shelf.lease()
    assert lease is not None
    room = lease.open()
    sent = write_block(image(4), lease.address, room)
    assert sent is not None
    block = sent.read(room)
    assert np.shares_memory(block.columns[0], room)
    assert not block.columns[0].flags.writeable
    assert block.columns[0].max() == 4
    large = block_of_rows([np.zeros(2 << 20, np.uint8)])
    assert write_block(large, lease.address, room[: 1 << 20]) is None
    gone = replace(sent, address=replace(sent.address, token=b"another's token!"))
    assert InputWorker("here").run_into(sent.address, b"", b"", gone, (0,)) is None
