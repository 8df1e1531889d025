"""Dataset.load: the elements of a saved dataset."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import pyarrow as pa

from raydist.nest import unflatten
from raydist.pipelines.formats.byte_streams import PlainStream
from raydist.pipelines.formats.files import data_loss, path_text
from raydist.pipelines.formats.saved import DATA_FILE, Manifest, block_of_bytes, read_manifest
from raydist.pipelines.formats.tfrecord import RecordReader
from raydist.pipelines.op import ElementError, Item
from raydist.pipelines.sources.table_files import TableFilesOp, TableFormat, TableReader

__all__ = ["SavedFormat", "load_op"]


def load_op(path: Any) -> TableFilesOp:
    """The dataset saved at `path`. Reads its manifest."""
    manifest = read_manifest(path)
    return TableFilesOp((os.path.join(path_text(path), DATA_FILE),), SavedFormat(manifest), manifest.num_rows)


@final
@dataclass(frozen=True, eq=False)
class SavedFormat(TableFormat):
    """Framed Arrow batches of the elements that `manifest` describes."""

    name: ClassVar[str] = "load"
    label: ClassVar[str] = ""
    manifest: Manifest

    @property
    def spec(self) -> Any:
        return unflatten(self.manifest.structure, self.manifest.specs)

    def open(self, path: str, position: Sequence[int]) -> TableReader:
        stream = PlainStream(path)
        try:
            found = stream.bound()
            if found != self.manifest.num_bytes:
                raise data_loss(
                    path, found or 0, f"The file must have the {self.manifest.num_bytes} bytes of the manifest"
                )
            offset, index = position or (0, 0)
            return SavedReader(self, path, RecordReader(stream, offset=offset, index=index))
        except BaseException:
            stream.close()
            raise


@final
class SavedReader(TableReader):
    """Reads one batch after the other."""

    def __init__(self, table_format: SavedFormat, path: str, records: RecordReader) -> None:
        self.ended = False
        self._format = table_format
        self._records = records
        self._path = path

    def position(self) -> list[int]:
        return [self._records.offset, self._records.index]

    def read(self, limit: int) -> list[Item]:
        offset = self._records.offset
        found, error = self._records.read(1)
        self.ended = self._records.ended
        if error is not None:
            return [ElementError(error)]
        try:
            return [block_of_bytes(record, self._format.manifest.structure) for record in found]
        except (pa.ArrowException, OSError, ValueError, TypeError, StopIteration) as wrong:
            problem = f"A batch of a saved dataset must be an Arrow stream, but reading it fails: {wrong}"
            return [ElementError(data_loss(self._path, offset, problem))]

    def close(self) -> None:
        self._records.close()
