"""Where the elements of a pass are kept in files, and how they get there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import final

from raydist.errors import FailedPreconditionError, NotFoundError
from raydist.nest import unflatten
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.formats.files import file_errors, local_path
from raydist.pipelines.stored.containers import Container
from raydist.pipelines.stored.file_lock import FileLock
from raydist.pipelines.stored.manifest import Manifest
from raydist.pipelines.stored.new_directory import new_directory, remove_remains
from raydist.pipelines.stored.write import SavedWriter, ShardFunction, read_manifest

__all__ = ["BusyStoreError", "Recorder", "Store"]


class BusyStoreError(Exception):
    """Somebody else is writing there; its text says who."""


@final
@dataclass(frozen=True, slots=True)
class Store:
    """A directory for the elements of one whole pass.

    Attributes:
        path: A local path or a URI.
        container: What kind of files.
        shard_func: The shard of an element; None keeps them in order.
    """

    path: str
    container: Container
    shard_func: ShardFunction | None = None

    def find(self) -> Manifest | None:
        """What is kept there, or None. DataLossError where the manifest is damaged."""
        try:
            return read_manifest(self.path)
        except (NotFoundError, NotADirectoryError):
            return None

    def lock(self) -> FileLock | None:
        """What a writer must hold; None on other file systems, where the first who finishes wins."""
        local = local_path(self.path)
        return None if local is None else FileLock(f"{local.rstrip('/')}.lock")


@final
class Recorder:
    """Writes the elements of one pass into a store. What is not committed leaves nothing."""

    def __init__(self, store: Store, origin: str) -> None:
        self._store = store
        self._origin = origin
        self._lock = store.lock()
        self._writer: SavedWriter | None = None

    def open(self) -> None:
        """Keep others from writing there, and remove what crashed writers have left.

        Raises:
            BusyStoreError: Somebody else is writing there.
            FailedPreconditionError: There is something else.
        """
        if self._lock is not None:
            with file_errors(self._lock.path):
                os.makedirs(os.path.dirname(os.path.abspath(self._lock.path)), exist_ok=True)
            if not self._lock.acquire():
                raise BusyStoreError(self._lock.holder())
            remove_remains(self._store.path)
        try:
            new_directory(self._store.path).check_new()
        except BaseException:
            self.close()
            raise

    def write(self, block: Block) -> None:
        """Append elements."""
        if self._writer is None:
            self._writer = self._new_writer(unflatten(block.structure, block.specs))
        self._writer.write(block)

    def _new_writer(self, spec: object) -> SavedWriter:
        store = self._store
        return SavedWriter(new_directory(store.path), spec, store.container, store.shard_func, self._origin)

    def commit(self) -> None:
        """The pass has ended: from now on the elements are there."""
        writer = self._writer or self._new_writer(TensorSpec())  # without elements, of any kind
        try:
            writer.commit()
        except FailedPreconditionError:
            if self._store.find() is None:
                raise
            # Another writer was faster, where nothing locks: its elements are as good.
        finally:
            self.close()

    def close(self) -> None:
        """Remove what was not committed. May be called twice."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        if self._lock is not None:
            self._lock.release()

    def __del__(self) -> None:
        self.close()  # an iterator that was dropped in the middle of a pass
