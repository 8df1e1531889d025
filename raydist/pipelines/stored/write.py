"""Writers of elements to a directory: files of chunks with checksums, and a manifest.

The directory appears complete or not at all, even with crashes and several writers. Locally, the files are written to a
hidden directory beside the target, which is renamed once all data is durable. Object stores cannot rename: there the
files get unique names, and the manifest, written last, lists the valid ones. In both cases the first writer to finish
wins.

The shape of a leaf may change from block to block. After the first change, the leaf is ragged: each element
is stored as values and a shape.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.core.exception_utils import annotate
from raydist.core.nest import Structure
from raydist.pipelines.elements.arrow import block_of_arrow, block_to_arrow
from raydist.pipelines.elements.blocks import Block, Column, concat_blocks, object_column
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.functions import call_rows
from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.rows import stack_leaves
from raydist.pipelines.formats.files import file_errors, local_path, open_within, path_text, read_range
from raydist.pipelines.stored.containers import ChunkWriter, Container, ContainerWriter
from raydist.pipelines.stored.directory_files import RemoteFiles
from raydist.pipelines.stored.file_directory import DirectoryFiles, LocalFiles, sync_directory
from raydist.pipelines.stored.manifest import Manifest, StoredFile, schema_of

ShardFunction = Callable[..., Any]
MANIFEST_FILE = "manifest.json"
_RAGGED = "ragged"
_RANK_ERROR = (
    "A leaf must have the same rank in all elements that are saved, got {}. Map the elements to arrays of one rank."
)
_CHUNK_BYTES = 1 << 22
_CHUNK_ROWS = 1 << 16
_MAX_SHARDS = 1000  # files open at a time
_MAX_MANIFEST_BYTES = 1 << 28


def remove_remains(path: str) -> None:
    """Remove the hidden directories that crashed writers left beside a local directory. No writer may be active."""
    parent, name = os.path.split(os.path.abspath(path))
    with contextlib.suppress(FileNotFoundError):
        for entry in os.listdir(parent):
            if entry.startswith(f".{name}.") and entry.endswith(".tmp"):
                shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)


class NewDirectory:
    """A directory that is being written, local or at a URI that fsspec knows. Creates nothing before the first file.

    Attributes:
        target: Path of the directory, without credentials.
        prefix: Prefix that the name of each file must have.
    """

    def __init__(self, path: Any) -> None:
        text = path_text(path)
        local = local_path(text)
        self._hidden: str | None = None  # path of the hidden directory, if local
        self._created: list[str] = []  # names of files, if remote
        if local is None:
            remote = RemoteFiles(text.rstrip("/"))
            self.target, self.prefix = remote.shown, f"{uuid.uuid4().hex}-"
            self._files: DirectoryFiles = remote
        else:
            self.target, self.prefix = local, ""
            parent, name = os.path.split(os.path.abspath(local))
            self._hidden = os.path.join(parent, f".{name}.{uuid.uuid4().hex}.tmp")
            self._files = LocalFiles(self._hidden)

    def check_new(self) -> None:
        """Raise FailedPreconditionError if the directory exists already."""
        if self._files.exists(MANIFEST_FILE) if self._hidden is None else os.path.lexists(self.target):
            raise self._exists()

    def create(self, name: str) -> BinaryIO:
        if self._hidden is None:
            self._files.make()
            self._created.append(name)
        elif not os.path.isdir(self._hidden):
            with file_errors(os.path.dirname(self._hidden)):
                os.mkdir(self._hidden)
        return self._files.create(name)

    def finish(self, file: BinaryIO) -> None:
        """Close a file and make its data durable."""
        with file_errors(self.target):  # closing writes buffered data, and so may find a full disk
            self._files.finish(file)

    def commit(self, manifest: bytes) -> None:
        """Make the directory visible, in one step.

        Raises:
            FailedPreconditionError: Another writer has committed first. The files of this writer are removed.
        """
        try:
            if self._hidden is None:
                self.check_new()
                self._files.replace(MANIFEST_FILE, manifest)
                self._created = []
            else:
                self._rename(self._hidden, manifest)
        finally:
            self.abandon()

    def _rename(self, hidden: str, manifest: bytes) -> None:
        file = self.create(MANIFEST_FILE)
        try:
            file.write(manifest)
        finally:
            self.finish(file)
        self._files.sync()
        self.check_new()
        try:
            os.rename(hidden, self.target)
        except OSError as error:
            if os.path.isdir(self.target):  # another writer has just created it
                raise self._exists() from error
            raise
        sync_directory(os.path.dirname(hidden))

    def abandon(self) -> None:
        """Remove the written files. Does nothing after `commit`. May be called twice."""
        if self._hidden is not None:
            shutil.rmtree(self._hidden, ignore_errors=True)
        created, self._created = self._created, []
        for name in created:
            with contextlib.suppress(Exception):
                self._files.remove(name)

    def _exists(self) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"Elements can only be written to a path that does not exist yet, got {self.target!r}. Remove it first."
        )


class BlockSchema:
    """The Arrow layout of stored elements. A leaf becomes ragged once its shape has changed between blocks."""

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
            self._kinds = [_shape_or_ragged(column) for column in block.columns]
        if block.signature != self._signature:
            raise SpecError(
                f"All elements must have one structure and dtype, got {self._signature} and then {block.signature}."
            )
        for number, column in enumerate(block.columns):
            if _shape_or_ragged(column) != self._kinds[number]:
                self._kinds[number] = _RAGGED
        columns = [
            _as_ragged(column) if kind == _RAGGED else column
            for column, kind in zip(block.columns, self._kinds, strict=True)
        ]
        return block_to_arrow(Block(block.structure, block.specs, tuple(columns), block.num_rows))


def _shape_or_ragged(column: Column) -> Any:
    """Return the shape of the leaves if they share one, else "ragged"."""
    if column.dtype != object or column.ndim > 1:
        return _RAGGED if 0 in column.shape[1:] else column.shape[1:]  # Parquet has no lists of size 0
    kinds = set(map(type, column))
    if np.ndarray in kinds and len(kinds) > 1:
        raise SpecError(_RANK_ERROR.format("scalars and arrays"))
    return _RAGGED if np.ndarray in kinds else ()


def _as_ragged(column: Column) -> Column:
    if column.dtype == object and column.ndim == 1:
        if not isinstance(column[0], np.ndarray):
            raise SpecError(_RANK_ERROR.format("text and arrays"))
        return column
    if column.ndim == 1:
        raise SpecError(_RANK_ERROR.format("scalars and arrays"))
    return object_column(list(column))


def block_of_batch(batch: pa.RecordBatch, structure: Structure) -> Block:
    """Convert a batch of a `BlockSchema` back to a block. A column is dense if all its leaves have one shape."""
    block = block_of_arrow(batch, structure)
    columns, specs = list(block.columns), list(block.specs)
    for number, column in enumerate(columns):
        if column.dtype == object and column.ndim == 1 and isinstance(column[0], np.ndarray):
            columns[number], specs[number] = stack_leaves(list(column), {np.ndarray})
    return Block(structure, tuple(specs), tuple(columns), block.num_rows)


def save_blocks(
    path: Any,
    element_spec: Any,
    blocks: Iterable[Block],
    container: Container,
    shard_func: ShardFunction | None = None,
) -> None:
    """Write blocks to a new directory. The directory appears once all of its data is durable."""
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
    """A writer of elements to a new directory, which becomes visible with `commit`.

    `shard_func` returns the shard number of an element, from 0; None for one shard. For `origin` see :class:`Manifest`.
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
        schema_of(self._structure)
        self._directory = directory
        self._container = container
        self._shard_func = shard_func
        self._origin = origin
        self._rows = 0
        self._shards: dict[int, _ShardWriter] = {}

    def write(self, block: Block) -> None:
        """Append elements.

        Raises:
            SpecError: The structure differs from the spec, or a shard number is not an integer.
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
                raise InvalidArgumentError(
                    f"There may be at most {_MAX_SHARDS} shards, got one more: {number}. Use fewer shards."
                )
            self._shards[number] = _ShardWriter(self._directory, self._container, number)
        return self._shards[number]

    def commit(self) -> None:
        """Make the directory visible. Raises FailedPreconditionError if another writer has committed first."""
        parts = tuple(part for number in sorted(self._shards) for part in self._shards[number].finish())
        manifest = Manifest(self._structure, tuple(self._specs), self._container, parts, self._origin)
        self._directory.commit(manifest.to_bytes())

    def abandon(self) -> None:
        """Remove the written files. Does nothing after `commit`. May be called twice."""
        for shard in self._shards.values():
            shard.close()
        self._shards = {}
        self._directory.abandon()


def _shards_of(shard_func: ShardFunction, block: Block, start: int) -> Any:
    results, failed = call_rows(shard_func, block.shared(), start)
    for row in failed:
        error = results[row]
        if isinstance(error, ElementError):
            annotate(error.error, f"In shard_func, element {start + row}.")
            raise error.error
    return np.array([_shard_number(result) for result in results], np.int64)


def _shard_number(result: Any) -> int:
    leaf = as_leaf(result)
    if getattr(leaf, "ndim", -1) != 0 or leaf.dtype.kind not in "iu":
        raise SpecError(f"shard_func must return one whole number, got {result!r:.100}.")
    if leaf < 0:
        raise InvalidArgumentError(f"shard_func must return a number >= 0, got {leaf}.")
    return int(leaf)


class _ShardWriter:
    """A writer of one shard. It begins a new file whenever the schema changes."""

    def __init__(self, directory: NewDirectory, container: Container, number: int) -> None:
        self._directory = directory
        self._container = container
        self._number = number
        self._block_schema = BlockSchema()
        self._held: list[Block] = []
        self._held_rows = self._held_bytes = 0
        self._parts: list[StoredFile] = []
        self._open: _OpenFile | None = None

    def write(self, block: Block) -> None:
        """Append elements. The writer collects them into chunks of a few MB."""
        max_rows = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES * block.num_rows // max(1, block.num_bytes)))
        for start in range(0, block.num_rows, max_rows):
            piece = block.slice(start, start + max_rows)
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
        if self._open is None or not batch.schema.equals(self._open.schema, check_metadata=True):
            self._end_part()
            self._open = self._begin_part(batch.schema)
        self._open.writer.write(batch)

    def _begin_part(self, schema: pa.Schema) -> _OpenFile:
        name = f"{self._directory.prefix}part-{self._number:05}-{len(self._parts):05}.{self._container.suffix}"
        file = self._directory.create(name)
        chunks = ChunkWriter(file, f"{self._directory.target}/{name}")
        try:
            return _OpenFile(name, file, chunks, schema, self._container.writer(chunks, schema))
        except BaseException:
            file.close()
            raise

    def _end_part(self) -> None:
        if self._open is not None:
            part, self._open = self._open, None
            part.writer.finish()
            self._directory.finish(part.file)
            self._parts.append(StoredFile(part.name, self._number, tuple(part.chunks.chunks)))

    def finish(self) -> list[StoredFile]:
        """Write the remaining elements and close the file."""
        self._flush()
        self._end_part()
        return self._parts

    def close(self) -> None:
        if self._open is not None:
            with contextlib.suppress(OSError):  # the caller removes the file
                self._open.file.close()
            self._open = None


class _OpenFile(NamedTuple):
    """An open file of a shard, with its writers."""

    name: str
    file: BinaryIO
    chunks: ChunkWriter
    schema: pa.Schema
    writer: ContainerWriter
