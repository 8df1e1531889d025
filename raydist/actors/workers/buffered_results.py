"""Blocks and results of stages in a shared buffer: written once, concatenated while written, and read in place."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from raydist.actors.class_tracking import cloudpickle
from raydist.actors.workers.shared_buffers import HEADER_BYTES, BufferAddress
from raydist.pipelines.elements.blocks import Block, Column
from raydist.pipelines.elements.items import Item, StageResult

__all__ = ["BufferWriter", "BufferedBlock", "BufferedResult", "write_block", "write_result"]

_LINE_BYTES = 64  # arrays begin at cache lines
_SMALL_BYTES = 1 << 16  # smaller results are sent with the answer

_Array = np.ndarray[Any, np.dtype[Any]]


@final
@dataclass(frozen=True, slots=True)
class BufferedResult:
    """A result whose arrays are in a buffer.

    Attributes:
        pickled: Pickle of the rest of the result.
        places: Offset and size of each array's memory.
    """

    pickled: bytes
    places: tuple[tuple[int, int], ...]

    def read(self, memory: _Array) -> StageResult:
        """Return the result; the arrays in it are views of `memory`, the mapped buffer."""
        result: StageResult = _read(self.pickled, self.places, memory.data)
        return result


@final
@dataclass(frozen=True, slots=True)
class BufferedBlock:
    """A block whose arrays are in a buffer; attributes as in `BufferedResult`.

    Attributes:
        address: Address of the buffer.
    """

    address: BufferAddress
    pickled: bytes
    places: tuple[tuple[int, int], ...]

    def read(self, memory: Any) -> Block:
        """Return the block; its arrays are read-only views, which must be copied before a user gets them."""
        block: Block = _read(self.pickled, self.places, memoryview(memory).toreadonly())
        return block


def _read(pickled: bytes, places: Sequence[tuple[int, int]], view: memoryview) -> Any:
    return pickle.loads(pickled, buffers=[view[offset : offset + size] for offset, size in places])


def write_block(block: Block, address: BufferAddress, memory: _Array) -> BufferedBlock | None:
    """Write a block's arrays into `memory`, the buffer at `address`; return None if they do not fit."""
    try:
        return BufferedBlock(address, *_write(block, BufferWriter(memory)))
    except _FullError:
        return None


def write_result(result: StageResult, writer: BufferWriter) -> BufferedResult | None:
    """Write a result's arrays into the memory of `writer`; return None if they are small, or do not fit.

    Neighbouring blocks become one, so that large elements, each a block of its own after a map, form one batch.
    """
    if sum(item.num_bytes for item in result.items if isinstance(item, Block)) < _SMALL_BYTES:
        return None
    try:
        return BufferedResult(*_write(replace(result, items=tuple(_joined(result.items, writer))), writer))
    except _FullError:
        return None


def _write(value: Any, writer: BufferWriter) -> tuple[bytes, tuple[tuple[int, int], ...]]:
    buffers: list[pickle.PickleBuffer] = []
    pickled: bytes = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickled, tuple(writer.place(np.frombuffer(buffer.raw(), np.uint8)) for buffer in buffers)


class _FullError(Exception):
    """The buffer has no room left."""


@final
class BufferWriter:
    """An allocator that hands out a buffer's memory from the beginning on.

    Args:
        memory: The whole buffer, writable.
    """

    def __init__(self, memory: Any) -> None:
        self._memory: _Array = np.frombuffer(memory, np.uint8)
        self._begin = _address(self._memory)
        self._at = HEADER_BYTES

    def make_column(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column | None:
        """Allocate a column of numbers in the buffer; return None if it is small, or does not fit."""
        num_bytes = dtype.itemsize * math.prod(shape)
        if num_bytes < _SMALL_BYTES or self._at + num_bytes > len(self._memory):
            return None
        return np.ndarray(shape, dtype, self._memory.data, self.reserve(num_bytes))

    def reserve(self, num_bytes: int) -> int:
        """Reserve `num_bytes` and return the offset."""
        offset = self._at
        if offset + num_bytes > len(self._memory):
            raise _FullError
        self._at = -(-(offset + num_bytes) // _LINE_BYTES) * _LINE_BYTES
        return offset

    def place(self, data: _Array) -> tuple[int, int]:
        """Return offset and size of some bytes in the buffer; copy them into the buffer if they are elsewhere."""
        offset = _address(data) - self._begin
        if not 0 < offset < len(self._memory):
            offset = self.reserve(len(data))
            self._memory[offset : offset + len(data)] = data
        return offset, len(data)

    def column(self, parts: Sequence[Column], num_rows: int) -> Column:
        """Concatenate the rows of `parts` into one column in the buffer."""
        first = parts[0]
        size = first.itemsize * num_rows * int(np.prod(first.shape[1:], dtype=np.int64))
        offset = self.reserve(size)
        joined: Column = np.ndarray((num_rows, *first.shape[1:]), first.dtype, self._memory.data, offset)
        np.concatenate(parts, out=joined)
        return joined


def _address(array: _Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _joined(items: Sequence[Item], writer: BufferWriter) -> list[Item]:
    joined: list[Item] = []
    for kind, run in itertools.groupby(items, _dense_kind):
        blocks = list(run)
        joined += blocks if kind is None or len(blocks) == 1 else [_one_block(blocks, writer)]
    return joined


def _dense_kind(item: Item) -> Any:
    """Return a key that is equal for blocks that can be concatenated; None for other items."""
    if not isinstance(item, Block) or any(column.dtype == object for column in item.columns):
        return None
    return item.structure, item.specs, tuple((column.dtype, column.shape[1:]) for column in item.columns)


def _one_block(blocks: Sequence[Any], writer: BufferWriter) -> Block:
    first = blocks[0]
    num_rows = sum(block.num_rows for block in blocks)
    columns = tuple(
        writer.column([block.columns[number] for block in blocks], num_rows) for number in range(len(first.columns))
    )
    return Block(first.structure, first.specs, columns, num_rows)
