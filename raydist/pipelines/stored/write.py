"""Writing elements to a directory: files of chunks with checksums, and a manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, final

import numpy as np
import pyarrow as pa

from raydist.errors import InvalidArgumentError, SpecError
from raydist.foreign_errors import annotate
from raydist.pipelines.elements.blocks import Block, concat_blocks
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.functions import call_rows
from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.formats.files import path_text
from raydist.pipelines.formats.opening import open_within
from raydist.pipelines.stored.chunks import ChunkWriter
from raydist.pipelines.stored.containers import Container, ContainerWriter
from raydist.pipelines.stored.manifest import Manifest, StoredFile
from raydist.pipelines.stored.new_directory import MANIFEST_FILE, NewDirectory, new_directory
from raydist.pipelines.stored.outline import outline_of
from raydist.pipelines.stored.schema import BlockSchema

__all__ = ["SavedWriter", "ShardFunction", "read_manifest", "save_blocks"]

ShardFunction = Callable[..., Any]

_CHUNK_BYTES = 1 << 22
_CHUNK_ROWS = 1 << 16
_MAX_SHARDS = 1000  # files open at a time
_MAX_MANIFEST_BYTES = 1 << 28
_READ_BYTES = 1 << 20


def save_blocks(
    path: Any,
    element_spec: Any,
    blocks: Iterable[Block],
    container: Container,
    shard_func: ShardFunction | None = None,
) -> None:
    """Write a new directory, which appears once all of its data is durable."""
    directory = new_directory(path)
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
    content = b""
    try:
        while len(content) < _MAX_MANIFEST_BYTES and (more := opened.file.read(_READ_BYTES)):
            content += more
    finally:
        opened.file.close()
    return Manifest.of_bytes(content, file)


@final
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


@final
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
