"""Elements of one epoch in files: read from them if they exist, otherwise from the input, and stored."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raydist.core.errors import FailedPreconditionError, NotFoundError
from raydist.core.nest import unflatten
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.producers import ResumableProducer, read_item
from raydist.pipelines.engine.resume import read_items
from raydist.pipelines.formats.files import file_errors, local_path
from raydist.pipelines.stored.containers import MAX_CHUNK_BYTES, Container
from raydist.pipelines.stored.manifest import Manifest
from raydist.pipelines.stored.read import saved_op, state_at
from raydist.pipelines.stored.write import NewDirectory, SavedWriter, ShardFunction, read_manifest, remove_remains

_TRIES = 100  # each fails only if a holder has just released the lock
_MARK = "process "  # first bytes of a lock file
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_ROWS = 1024  # elements read at a time while resuming


class FileLock:
    """A lock by `flock` on a file, which exists while the lock is held. The kernel frees it when its process ends.

    Without locks in the file system, every process acquires it: the lock avoids double work and protects nothing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Acquire the lock if it is free, also in this process; return True on success. Does not wait."""
        for _ in range(_TRIES):
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return False
                if error.errno in _NO_LOCKS:
                    return True
                raise
            if self._is_current(descriptor):
                self._descriptor = descriptor
                os.truncate(descriptor, 0)
                os.write(descriptor, f"{_MARK}{os.getpid()} on {platform.node()}".encode())
                return True
            os.close(descriptor)  # the last holder removed the file before this lock was acquired
        return False

    def _open(self) -> int:
        """Open the lock file; raise FailedPreconditionError if another file has the name, to avoid overwriting it."""
        try:
            with file_errors(self.path):
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._taken("a link") from error
            raise
        status = os.fstat(descriptor)
        plain = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1
        if not plain or os.pread(descriptor, len(_MARK), 0) not in (b"", _MARK.encode()):
            os.close(descriptor)
            raise self._taken("another file")
        return descriptor

    def _taken(self, what: str) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"The name of a lock must be free, but {self.path!r} is {what}, which would be overwritten. Move it away, "
            "or write to another path."
        )

    def _is_current(self, descriptor: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        return False

    def holder(self) -> str:
        """Return the holder of the lock, for messages."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_RDONLY | _FLAGS)
            try:
                return os.read(descriptor, 200).decode(errors="replace") or "somebody"
            finally:
                os.close(descriptor)
        return "somebody who has just gone"

    def release(self) -> None:
        """Free the lock. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
            os.close(descriptor)


class BusyStoreError(Exception):
    """Raised while another writer is active; the text names it."""


@dataclass(frozen=True, slots=True)
class Store:
    """A directory for the elements of one complete pass."""

    path: str  # a local path or a URI
    container: Container  # format of the files
    shard_func: ShardFunction | None = None  # returns the shard of an element; None keeps elements in order

    def find(self) -> Manifest | None:
        """Return the manifest, or None if there is none. Raises DataLossError if it is damaged."""
        try:
            return read_manifest(self.path)
        except (NotFoundError, NotADirectoryError):
            return None

    def lock(self) -> FileLock | None:
        """Return the lock for writers; None on other file systems, where the first writer to finish wins."""
        local = local_path(self.path)
        return None if local is None else FileLock(f"{local.rstrip('/')}.lock")


class Recorder:
    """A writer of the elements of one pass to a store. Without a commit, nothing remains."""

    def __init__(self, store: Store, origin: str) -> None:
        self._store = store
        self._origin = origin
        self._lock = store.lock()
        self._writer: SavedWriter | None = None

    def open(self) -> None:
        """Acquire the lock, and remove what crashed writers have left.

        Raises:
            BusyStoreError: Another writer is active.
            FailedPreconditionError: The path is taken.
        """
        if self._lock is not None:
            with file_errors(self._lock.path):
                os.makedirs(os.path.dirname(os.path.abspath(self._lock.path)), exist_ok=True)
            if not self._lock.acquire():
                raise BusyStoreError(self._lock.holder())
            remove_remains(self._store.path)
        try:
            NewDirectory(self._store.path).check_new()
        except BaseException:
            self.close()
            raise

    def write(self, block: Block) -> None:
        if self._writer is None:
            self._writer = self._new_writer(unflatten(block.structure, block.specs))
        self._writer.write(block)

    def _new_writer(self, spec: object) -> SavedWriter:
        store = self._store
        return SavedWriter(NewDirectory(store.path), spec, store.container, store.shard_func, self._origin)

    def commit(self) -> None:
        """Finish the pass: the elements become visible."""
        writer = self._writer or self._new_writer(TensorSpec())  # without elements, any spec will do
        try:
            writer.commit()
        except FailedPreconditionError:
            if self._store.find() is None:
                raise
            # Another writer was faster, where there are no locks: its elements are the same.
        finally:
            self.close()

    def close(self) -> None:
        """Remove uncommitted files. May be called twice."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        if self._lock is not None:
            self._lock.release()

    def __del__(self) -> None:
        self.close()  # an iterator that was garbage-collected within a pass


@dataclass(frozen=True, slots=True)
class CachedEpochSettings:
    """The settings of a pass."""

    store: Store
    read_input: Callable[[], OpIterator]  # opens the input
    seed: int  # two passes with the same seed have the same elements
    label: str  # of the operation, for messages
    waits_for_nobody: bool  # read the input without storing while another writer is active, or raise an error then

    def recorder(self) -> Recorder:
        """Open a recorder.

        Raises:
            FailedPreconditionError: Another writer is active, or the path is taken.
        """
        recorder = Recorder(self.store, str(self.seed))
        try:
            recorder.open()
        except BusyStoreError as busy:
            raise FailedPreconditionError(
                f"Only one iterator at a time can fill {self.label} in {self.store.path!r}, and {busy} does. Wait "
                "until it has read everything, or close it."
            ) from busy
        return recorder

    def changed(self) -> FailedPreconditionError:
        """Return the error for a state whose elements no longer exist."""
        return FailedPreconditionError(
            f"The files of {self.label} must be those that the state was saved with, but in {self.store.path!r} they "
            "have been removed or written anew. Begin a new epoch."
        )


class CachedEpoch(ResumableProducer):
    """A producer of one pass. Passes with an error, and incomplete passes, are not stored.

    The state is the number of elements handed out, and the position in the files if it reads them.
    """

    def __init__(self, settings: CachedEpochSettings) -> None:
        self._settings = settings
        self._row = 0  # index of the next element
        self._origin: str | None = None  # origin of the elements; None before the first
        self._resume_at: IteratorState | None = None  # position in the files
        self._kept: OpIterator | None = None
        self._source: OpIterator | None = None
        self._recorder: Recorder | None = None
        self._ended = False

    def make(self, limit: int) -> Sequence[Item]:
        if self._ended:
            raise StopIteration
        if self._kept is None and self._source is None:
            try:
                self._open()
            except Exception:
                self._ended = True  # a failed opening is not the error of an element: the iteration ends
                raise
        item = read_item(self._kept, limit) if self._kept is not None else self._read(limit)
        self._row += 1 if isinstance(item, ElementError) else item.num_rows
        return [item]

    def _open(self) -> None:
        found = self._settings.store.find()
        if found is None:
            self._open_recorder()
            found = self._settings.store.find()  # the other writer may have finished meanwhile
        own = str(self._settings.seed)
        if found is not None and self._origin in (None, found.origin):
            self._read_kept(found)
            return
        if self._origin not in (None, own):
            raise self._settings.changed()
        if found is not None:
            self._stop_recording()
        self._origin = own
        self._source = self._settings.read_input()
        self._pass_over()

    def _open_recorder(self) -> None:
        try:
            self._recorder = self._settings.recorder()
        except FailedPreconditionError as error:
            busy = isinstance(error.__cause__, BusyStoreError)
            if not (busy and self._settings.waits_for_nobody) and self._settings.store.find() is None:
                raise

    def _read_kept(self, manifest: Manifest) -> None:
        self._stop_recording()
        self._origin = manifest.origin
        op = saved_op(self._settings.store.path, manifest, manifest.parts, MAX_CHUNK_BYTES)  # written by raydist
        self._kept = op.iterator()
        if self._row:
            self._kept.load_state_dict(self._resume_at or state_at(manifest, self._row))

    def _pass_over(self) -> None:
        """Read again the elements that were handed out before the state was saved."""
        left, self._row = self._row, 0
        while left:
            items = read_items(self._source, min(left, _ROWS)) if self._source is not None else []
            if not items:
                raise FailedPreconditionError(
                    f"The input of {self._settings.label} must be the same again to resume, but it ended {left} "
                    "elements earlier. Resume with the data that the state was saved with."
                )
            for item in items:
                self._record(item)
                size = 1 if isinstance(item, ElementError) else item.num_rows
                self._row += size
                left -= size

    def _read(self, limit: int) -> Item:
        if self._source is None:
            raise StopIteration
        try:
            item = read_item(self._source, limit)
        except StopIteration:
            if self._recorder is not None:
                self._recorder.commit()
                self._recorder = None
            self._ended = True
            raise
        self._record(item)
        # The recorder holds the block for a while, and a user may work in place.
        return item if isinstance(item, ElementError) else item.shared()

    def _record(self, item: Item) -> None:
        if isinstance(item, ElementError):
            self._stop_recording()
        elif self._recorder is not None:
            try:
                self._recorder.write(item)
            except BaseException:
                self._ended = True  # such as a full disk: continuing would lose elements
                self._stop_recording()
                raise

    def _stop_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def border(self) -> IteratorState:
        kept = self._resume_at if self._kept is None else self._kept.state_dict()
        return {"row": self._row, "origin": self._origin, "kept": kept}

    def restore(self, border: IteratorState) -> None:
        self._row, self._origin, self._resume_at = int(border["row"]), border["origin"], border["kept"]

    def close(self) -> None:
        self._stop_recording()
        for iterator in (self._kept, self._source):
            if iterator is not None:
                iterator.close()
