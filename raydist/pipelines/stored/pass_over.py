"""One epoch of stored elements: read from files if they exist, otherwise from the input, and stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from raydist.errors import FailedPreconditionError
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.producers import ResumableProducer, read_item
from raydist.pipelines.engine.resume import read_items
from raydist.pipelines.sources.table_files import TableFilesIterator
from raydist.pipelines.stored.containers import MAX_CHUNK_BYTES
from raydist.pipelines.stored.manifest import Manifest
from raydist.pipelines.stored.read import saved_op, state_at
from raydist.pipelines.stored.store import BusyStoreError, Recorder, Store

__all__ = ["StoredPass", "StoredPassSettings"]

_ROWS = 1024  # elements read at a time while resuming


@final
@dataclass(frozen=True, slots=True)
class StoredPassSettings:
    """The settings of a pass.

    Attributes:
        store: Directory of the elements.
        read_input: Opens the input.
        seed: Root seed: two passes with the same seed have the same elements.
        label: Label of the operation, for messages.
        waits_for_nobody: True to read the input without storing while another writer is active; False to raise an error
            then.
    """

    store: Store
    read_input: Callable[[], OpIterator]
    seed: int
    label: str
    waits_for_nobody: bool

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


@final
class StoredPass(ResumableProducer):
    """A producer of one pass. Passes with an error, and incomplete passes, are not stored.

    The state is the number of elements handed out, and the position in the files if it reads them.
    """

    def __init__(self, settings: StoredPassSettings) -> None:
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
        self._kept = TableFilesIterator(
            saved_op(self._settings.store.path, manifest, manifest.parts, MAX_CHUNK_BYTES)  # written by raydist
        )
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
