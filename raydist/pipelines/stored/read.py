"""`Dataset.load`: operations and readers for saved datasets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pyarrow as pa

from raydist.core.errors import DataLossError
from raydist.core.nest import LEAF
from raydist.pipelines.elements.blocks import Block, object_column
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.elements.spec import DatasetSpec
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.formats.files import OpenFile, data_loss, open_within, path_text
from raydist.pipelines.sources.file_format import TableFormat, TableReader
from raydist.pipelines.sources.memory import MemoryOp
from raydist.pipelines.sources.table_files import TableFilesOp
from raydist.pipelines.stored.containers import ContainerReader
from raydist.pipelines.stored.manifest import Manifest, StoredFile
from raydist.pipelines.stored.write import block_of_batch, read_manifest


def checked_manifest(path: Any, compression: str | None = None) -> Manifest:
    """Return the manifest of the dataset saved at `path`.

    Raises:
        DataLossError: `compression` is given and is not the compression of the files.
    """
    manifest = read_manifest(path)
    if compression is not None and manifest.container.compression != (compression or None):
        raise DataLossError(
            f"{path_text(path)!r} must have been saved with compression={compression!r}, but it was saved with "
            f"{manifest.container.compression!r}. Leave compression out: the manifest contains it.",
            path=path_text(path),
        )
    return manifest


def saved_op(
    path: Any, manifest: Manifest, parts: Sequence[StoredFile], max_chunk_bytes: int | None = None
) -> TableFilesOp:
    """Return the operation that reads the files `parts` of the saved dataset at `path`."""
    root = path_text(path).rstrip("/")
    files = {f"{root}/{part.name}": part for part in parts}
    num_rows = sum(part.num_rows for part in parts)
    return TableFilesOp(tuple(files), SavedFormat(manifest, root, files, max_chunk_bytes), num_rows)


def shards_op(
    path: Any, manifest: Manifest, make_dataset: Callable[[DatasetOp], Any], max_chunk_bytes: int | None = None
) -> MemoryOp:
    """Return the operation of a dataset of datasets, one for each shard. A `reader_func` gets this dataset."""
    datasets = [make_dataset(saved_op(path, manifest, parts, max_chunk_bytes)) for parts in manifest.shards()]
    spec = DatasetSpec(manifest.element_spec)
    return MemoryOp(Block(LEAF, (spec,), (object_column(datasets),), len(datasets)), "shards")


def state_at(manifest: Manifest, row: int) -> IteratorState:
    """Return the state that an iterator over the whole saved dataset has before element `row`."""
    file, chunk, inside = manifest.position(row)
    return {"at": {"file": file, "at": [chunk], "size": 0}, "skip": inside}


def saved_rows(op: TableFilesOp, file_format: SavedFormat, start: int, stop: int) -> tuple[TableFilesOp, int, int]:
    """Return an operation with the rows `start` .. `stop` - 1 of a whole saved dataset, and their numbers in it.

    The operation begins with the chunk of row `start`, and ends with the file of row `stop` - 1.
    """
    first, chunk, inside = file_format.manifest.position(start)
    last = file_format.manifest.position(max(start, stop - 1))[0]
    paths, parts = op.paths[first : last + 1], file_format.manifest.parts[first : last + 1]
    left_out = sum(each.rows for part in parts[:1] for each in part.blocks[:chunk])
    num_rows = sum(part.num_rows for part in parts) - left_out
    begun = replace(file_format, begin=(paths[0], chunk)) if chunk else file_format
    return replace(op, paths=paths, format=begun, num_rows=num_rows), inside, inside + stop - start


@dataclass(frozen=True, eq=False)
class SavedFormat(TableFormat):
    """The file format of saved datasets. The manifest lists the chunks of each file; a chunk is one record batch."""

    name: ClassVar[str] = "load"
    manifest: Manifest  # manifest of all files
    root: str = ""  # directory of the files
    files: dict[str, StoredFile] = field(default_factory=dict)  # files to read, by path
    max_chunk_bytes: int | None = field(default=None, metadata={"fingerprint": False})  # see :meth:`Container.reader`
    # A file, and the first of its chunks to read: of a file of which the beginning is left out.
    begin: tuple[str, int] = field(default=("", 0), metadata={"fingerprint": "if given"})
    label = ""

    @property
    def spec(self) -> Any:
        return self.manifest.element_spec

    def starts_anywhere(self, path: str) -> bool:
        return True

    def open(self, path: str, position: Sequence[int]) -> TableReader:
        part = self.files[path]
        opened = open_within(self.root, path)
        try:
            if opened.size is not None and opened.size != part.num_bytes:
                at = min(opened.size, part.num_bytes)
                raise data_loss(path, at, f"The file must have the {part.num_bytes} bytes of the manifest")
            container = self._container(opened, path, part)
        except BaseException:
            opened.file.close()
            raise
        start = position[0] if position else self.begin[1] if path == self.begin[0] else 0
        return SavedReader(self.manifest, path, part, opened, container, start)

    def _container(self, opened: OpenFile, path: str, part: StoredFile) -> ContainerReader:
        try:
            return self.manifest.container.reader(opened, path, part.chunks, self.max_chunk_bytes)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise data_loss(
                path, 0, f"A file of saved elements must be intact, but reading it fails: {error}"
            ) from error


class SavedReader(TableReader):
    """A reader of one file, chunk by chunk."""

    def __init__(
        self, manifest: Manifest, path: str, part: StoredFile, opened: OpenFile, container: ContainerReader, start: int
    ) -> None:
        self._manifest = manifest
        self._path = path
        self._blocks = part.blocks
        self._file = opened.file
        self._container = container
        self._next = start
        self.ended = start >= len(self._blocks)

    def position(self) -> list[int]:
        return [self._next]

    def read(self, limit: int) -> list[Item]:
        if self.ended:
            return []
        number = self._next
        self._next += 1
        self.ended = self._next >= len(self._blocks)
        try:
            return [self._block(number)]
        except (pa.ArrowException, OSError, ValueError, TypeError, IndexError) as error:
            problem = f"A chunk of saved elements must be a record batch, but reading it fails: {error}"
            return [ElementError(data_loss(self._path, self._blocks[number].offset, problem))]
        except Exception as error:
            return [ElementError(error)]

    def _block(self, number: int) -> Block:
        batch = self._container.read(number)
        batch.validate(full=True)
        expected = self._blocks[number].rows
        if batch.num_rows != expected:
            raise ValueError(f"it has {batch.num_rows} elements, but {expected} in the manifest")
        return block_of_batch(batch, self._manifest.structure)

    def close(self) -> None:
        self._file.close()
