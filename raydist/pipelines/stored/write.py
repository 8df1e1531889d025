"""Writing elements to a directory: files of chunks with checksums, and a manifest.

A column may be dense in one block and not in the next. A leaf that has had two shapes is stored as "values and shape"
from then on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from raydist.errors import InvalidArgumentError, SpecError
from raydist.foreign_errors import annotate
from raydist.nest import Structure
from raydist.pipelines.elements.arrow import block_of_arrow, block_to_arrow
from raydist.pipelines.elements.blocks import Block, Column, concat_blocks, object_column
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.functions import call_rows
from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.rows import stack_leaves
from raydist.pipelines.formats.files import path_text, read_range
from raydist.pipelines.formats.opening import open_within
from raydist.pipelines.stored.containers import ChunkWriter, Container, ContainerWriter
from raydist.pipelines.stored.manifest import Manifest, StoredFile, outline_of
from raydist.pipelines.stored.new_directory import MANIFEST_FILE, NewDirectory

__all__ = ["BlockSchema", "SavedWriter", "ShardFunction", "block_of_batch", "read_manifest", "save_blocks"]

_RAGGED = "ragged"
_RANKS = "Elements that are kept in files must have one rank in each leaf, got {}. Map them to arrays of one rank."


class BlockSchema:
    """The layout of the leaves of stored elements, which adapts to the blocks."""

    def __init__(self) -> None:
        self._signature = ""
        self._kinds: list[Any] = []

    def batch(self, block: Block) -> pa.RecordBatch:
        """Return the block as a record batch, with the schema of the previous batch if shapes allow that.

        Raises:
            SpecError: Structure or dtypes differ from the first block.
        """
        block = block.of_tensors("what is kept in files")
        if not self._signature:
            self._signature = block.signature
            self._kinds = [_kind(column) for column in block.columns]
        if block.signature != self._signature:
            raise SpecError(
                f"All elements must have one structure and dtype, got {self._signature} and then {block.signature}."
            )
        for number, column in enumerate(block.columns):
            if _kind(column) != self._kinds[number]:
                self._kinds[number] = _RAGGED
        columns = [
            _as_ragged(column) if kind == _RAGGED else column
            for column, kind in zip(block.columns, self._kinds, strict=True)
        ]
        return block_to_arrow(Block(block.structure, block.specs, tuple(columns), block.num_rows))


def _kind(column: Column) -> Any:
    """Return the shape of the leaves if they share one, else "ragged"."""
    if column.dtype != object or column.ndim > 1:
        return _RAGGED if 0 in column.shape[1:] else column.shape[1:]  # Parquet has no lists of size 0
    kinds = set(map(type, column))
    if np.ndarray in kinds and len(kinds) > 1:
        raise SpecError(_RANKS.format("scalars and arrays"))
    return _RAGGED if np.ndarray in kinds else ()


def _as_ragged(column: Column) -> Column:
    if column.dtype == object and column.ndim == 1:
        if not isinstance(column[0], np.ndarray):
            raise SpecError(_RANKS.format("text and arrays"))
        return column
    if column.ndim == 1:
        raise SpecError(_RANKS.format("scalars and arrays"))
    return object_column(list(column))


def block_of_batch(batch: pa.RecordBatch, structure: Structure) -> Block:
    """Return the block from which a BlockSchema made a batch; columns are dense if their leaves share a shape."""
    block = block_of_arrow(batch, structure)
    columns, specs = list(block.columns), list(block.specs)
    for number, column in enumerate(columns):
        if column.dtype == object and column.ndim == 1 and isinstance(column[0], np.ndarray):
            columns[number], specs[number] = stack_leaves(list(column), {np.ndarray})
    return Block(structure, tuple(specs), tuple(columns), block.num_rows)


ShardFunction = Callable[..., Any]

_CHUNK_BYTES = 1 << 22
_CHUNK_ROWS = 1 << 16
_MAX_SHARDS = 1000  # files open at a time
_MAX_MANIFEST_BYTES = 1 << 28


def save_blocks(
    path: Any,
    element_spec: Any,
    blocks: Iterable[Block],
    container: Container,
    shard_func: ShardFunction | None = None,
) -> None:
    """Write a new directory, which appears once all of its data is durable."""
    directory = NewDirectory(path)
    directory.check_new()
    writer = SavedWriter(directory, element_spec, container, shard_func)
    try:
        for block in blocks:
            writer.write(block)
        writer.commit()
    finally:
        writer.abandon()


def read_manifest(path: Any) -> Manifest:
    """Return the manifest of the directory at `path`. Raises NotFoundError, or DataLossError if it is damaged."""
    folder = path_text(path).rstrip("/")
    file = f"{folder}/{MANIFEST_FILE}"
    opened = open_within(folder, file)
    with contextlib.closing(opened.file):
        size = _MAX_MANIFEST_BYTES if opened.size is None else min(opened.size, _MAX_MANIFEST_BYTES)
        return Manifest.of_bytes(read_range(opened.file, 0, size), file)


class SavedWriter:
    """A writer of elements to files; nothing is visible before `commit`.

    Args:
        directory: Directory to write.
        element_spec: Nest of TensorSpec of an element.
        container: Format of the files.
        shard_func: Returns the shard of an element, from 0; None for one shard.
        origin: See :class:`Manifest`.
    """

    def __init__(
        self,
        directory: NewDirectory,
        element_spec: Any,
        container: Container,
        shard_func: ShardFunction | None = None,
        origin: str = "",
    ) -> None:
        self._specs, self._structure = flatten_element(element_spec)
        outline_of(self._structure)
        self._directory = directory
        self._container = container
        self._shard_func = shard_func
        self._origin = origin
        self._rows = 0
        self._shards: dict[int, _ShardWriter] = {}

    def write(self, block: Block) -> None:
        """Append elements.

        Raises:
            SpecError: The structure differs from the spec, or a shard is no whole number.
            Exception: The error of the shard function.
        """
        block.of_tensors("save")
        if block.structure != self._structure:
            raise SpecError(f"All elements must have the structure {self._structure}, got {block.structure}.")
        if self._shard_func is None:
            self._shard(0).write(block)
        else:
            shards = _shards_of(self._shard_func, block, self._rows)
            for shard in np.unique(shards).tolist():
                self._shard(shard).write(block.take(np.flatnonzero(shards == shard)))
        self._rows += block.num_rows

    def _shard(self, number: int) -> _ShardWriter:
        if number not in self._shards:
            if len(self._shards) == _MAX_SHARDS:
                raise InvalidArgumentError(f"There may be at most {_MAX_SHARDS} shards, got one more: {number}.")
            self._shards[number] = _ShardWriter(self._directory, self._container, number)
        return self._shards[number]

    def commit(self) -> Manifest:
        """Make the directory visible. Raises FailedPreconditionError if another writer was first."""
        parts = tuple(part for number in sorted(self._shards) for part in self._shards[number].finish())
        manifest = Manifest(self._structure, tuple(self._specs), self._container, parts, self._origin)
        self._directory.commit(manifest.to_bytes())
        return manifest

    def abandon(self) -> None:
        """Remove the written files. Does nothing after `commit`. May be called twice."""
        for shard in self._shards.values():
            shard.close()
        self._shards = {}
        self._directory.abandon()


def _shards_of(shard_func: ShardFunction, block: Block, start: int) -> Any:
    answers, failed = call_rows(shard_func, block.shared(), start)
    for row in failed:
        error = answers[row]
        if isinstance(error, ElementError):
            annotate(error.error, f"In shard_func, element {start + row}.")
            raise error.error
    return np.array([_shard_number(answer) for answer in answers], np.int64)


def _shard_number(answer: Any) -> int:
    leaf = as_leaf(answer)
    if getattr(leaf, "ndim", -1) != 0 or leaf.dtype.kind not in "iu":
        raise SpecError(f"shard_func must return one whole number, got {answer!r:.100}.")
    if leaf < 0:
        raise InvalidArgumentError(f"shard_func must return a number >= 0, got {leaf}.")
    return int(leaf)


class _ShardWriter:
    """A writer of the files of one shard: one file, and another one whenever the schema changes."""

    def __init__(self, directory: NewDirectory, container: Container, number: int) -> None:
        self._directory = directory
        self._container = container
        self._number = number
        self._block_schema = BlockSchema()
        self._held: list[Block] = []
        self._held_rows = self._held_bytes = 0
        self._parts: list[StoredFile] = []
        self._schema: pa.Schema | None = None
        self._name = ""
        self._file: BinaryIO | None = None
        self._chunks: ChunkWriter | None = None
        self._writer: ContainerWriter | None = None

    def write(self, block: Block) -> None:
        """Append elements, which are written in chunks of some MB."""
        most = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES * block.num_rows // max(1, block.num_bytes)))
        for start in range(0, block.num_rows, most):
            piece = block.slice(start, start + most)
            self._held.append(piece)
            self._held_rows += piece.num_rows
            self._held_bytes += piece.num_bytes
            if self._held_bytes >= _CHUNK_BYTES or self._held_rows >= _CHUNK_ROWS:
                self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        batch = self._block_schema.batch(concat_blocks(self._held))
        self._held, self._held_rows, self._held_bytes = [], 0, 0
        if self._schema is None or not batch.schema.equals(self._schema, check_metadata=True):
            self._end_part()
            self._begin_part(batch.schema)
        if self._writer is not None:
            self._writer.write(batch)

    def _begin_part(self, schema: pa.Schema) -> None:
        number = f"{self._number:05}-{len(self._parts):05}"
        self._name = f"{self._directory.prefix}part-{number}.{self._container.suffix}"
        self._file = self._directory.create(self._name)
        self._chunks = ChunkWriter(self._file, f"{self._directory.target}/{self._name}")
        self._schema = schema
        self._writer = self._container.writer(self._chunks, schema)

    def _end_part(self) -> None:
        if self._writer is None or self._chunks is None or self._file is None:
            return
        self._writer.finish()
        self._directory.finish(self._file)
        self._parts.append(StoredFile(self._name, self._number, tuple(self._chunks.chunks)))
        self._writer = self._chunks = self._file = None

    def finish(self) -> list[StoredFile]:
        """Write the remaining elements and close the file."""
        self._flush()
        self._end_part()
        return self._parts

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # the caller removes it
                self._file.close()
            self._writer = self._chunks = self._file = None
