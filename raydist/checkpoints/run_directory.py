"""The checkpoints of one run in one directory: retention, the exclusive right to write, and removal.

Each removal may be killed and repeated. The directory may contain files of the user: only files that certainly come
from a save are removed.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

from raydist.checkpoints.directory_lock import DirectoryLock
from raydist.checkpoints.listing import (
    FoundCheckpoint,
    KeptCheckpoint,
    Retention,
    checkpoint_path,
    find_checkpoints,
    folders_of,
)
from raydist.checkpoints.manifest import named_files
from raydist.checkpoints.tensor_file import MANIFEST_NAME, is_new_name, may_be_of_checkpoint, stem_of
from raydist.core.failpoints import failpoint
from raydist.pipelines.formats.files import shown_uri
from raydist.pipelines.stored.directory_files import DirectoryFiles, directory_files


def remove_checkpoint(files: DirectoryFiles) -> None:
    """Remove a checkpoint: first the manifest, then the other files. Files of other origin stay."""
    known = named_files(files)  # read first, because the listing of an object store may lag behind
    failpoint("retention.before_manifest")
    files.remove(MANIFEST_NAME)
    files.sync()  # if the manifest came back, it would name removed files
    failpoint("retention.after_manifest")
    for name in sorted({*known, *filter(may_be_of_checkpoint, files.names())} - {MANIFEST_NAME}):
        files.remove(name)
        failpoint("retention.within_files")
    _remove_directory(files)
    failpoint("retention.after_files")


def remove_leftovers(root: DirectoryFiles, folders: Iterable[str]) -> None:
    """Remove all files that no manifest names. The caller guarantees that no process is writing.

    A directory without a manifest that contains files of other origin stays.
    """
    failpoint("cleanup.before")
    for folder in folders:
        files = root.inside(folder)
        is_whole = files.exists(MANIFEST_NAME)  # the listing of an object store may lag behind
        for name in _unnamed(files) if is_whole else _of_no_one_else(files):
            files.remove(name)
            failpoint("cleanup.within")
        if not is_whole:
            _remove_directory(files)
    failpoint("cleanup.after")


def _of_no_one_else(files: DirectoryFiles) -> list[str]:
    """Return all files of a directory if saves may have written all of them; otherwise none."""
    names = files.names()
    return names if all(map(may_be_of_checkpoint, names)) and not files.folders() else []


def _unnamed(files: DirectoryFiles) -> list[str]:
    """Return the leftovers of saves beside a complete checkpoint; none if the manifest is unreadable."""
    named = named_files(files)
    stems = {stem_of(name) for name in named}
    left = [name for name in files.names() if is_new_name(name) or stem_of(name) in stems]
    return [name for name in left if name not in named] if named else []


def _remove_directory(files: DirectoryFiles) -> None:
    try:
        files.remove_directory()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


_log = logging.getLogger("raydist")


@final
class RunDirectory:
    """Checkpoints of one run. `save` may be called in another thread than the other methods."""

    def __init__(self, path: str, name: str, retention: Retention) -> None:
        self.path = path
        self.retention = retention
        self.name = name
        self._files = directory_files(path)
        self._directory_lock = DirectoryLock(self._files)
        self._lock = threading.Lock()  # guards the attributes below
        self._kept: list[KeptCheckpoint] | None = None  # set while the lock is held
        self._too_old: list[KeptCheckpoint] = []  # to be removed if they still exist
        self._began: float | None = None
        self._generation = 0  # of the last save into the directory

    @property
    def is_acquired(self) -> bool:
        """True while this process has the exclusive right to write."""
        return self._directory_lock.is_acquired

    def acquire(self) -> None:
        """Acquire the exclusive right to write, and remove the leftovers of killed saves.

        Raises:
            FailedPreconditionError: Another process writes into the directory; the message says which, and since when.
        """
        self._directory_lock.acquire()
        remove_leftovers(self._files, folders_of(self._files, self.name))
        found = self.find()
        generations = [each.kept.generation for each in find_checkpoints(self._files) if each.damage is None]
        began = [each.details["began"] for each in found if isinstance(each.details.get("began"), int | float)]
        with self._lock:
            self._began = min(began, default=None)
            self._kept = [each.kept for each in found if each.damage is None]
            self._generation = max(generations, default=0)

    def release(self) -> None:
        """Release the right to write."""
        with self._lock:
            self._kept = None
        self._directory_lock.release()

    def find(self) -> list[FoundCheckpoint]:
        """Return all checkpoints in the order of their saves, including damaged ones. Reads the directory."""
        return find_checkpoints(self._files, self.name)

    def path_of(self, kept: KeptCheckpoint) -> str:
        """Return the path of a checkpoint."""
        return checkpoint_path(self.path, kept.name)

    def path_to(self, number: int) -> str:
        """Return the path of the checkpoint with this number, which need not exist."""
        return checkpoint_path(self.path, f"{self.name}-{number}")

    def files_of(self, kept: KeptCheckpoint) -> DirectoryFiles:
        """Return the directory files of a checkpoint, which need not exist."""
        return self._files.inside(kept.name)

    def newest(self) -> list[str]:
        """Return the paths of the newest checkpoints, at most `max_to_keep`, oldest first."""
        return [self.path_of(each) for each in self.retention.newest(self._all())]

    def last(self) -> KeptCheckpoint | None:
        """Return the complete checkpoint that was saved last, or None."""
        return next(reversed(self._all()), None)

    def best(self) -> str | None:
        """Return the path of the best checkpoint, or None."""
        best = None if self.retention.best is None else self.retention.best.of(self._all())
        return None if best is None else self.path_of(best)

    def _all(self) -> list[KeptCheckpoint]:
        with self._lock:
            if self._kept is not None:
                return list(self._kept)
        return [each.kept for each in self.find() if each.damage is None]

    def begin(self, number: int, metrics: dict[str, float]) -> KeptCheckpoint:
        """Return the description of a new checkpoint, with the next generation."""
        now = time.time()
        with self._lock:
            self._began = now if self._began is None else self._began
            self._generation += 1  # also if the write fails
            return KeptCheckpoint(f"{self.name}-{number}", number, self._generation, now, metrics)

    def details_of(self, kept: KeptCheckpoint) -> Mapping[str, Any]:
        """Return the details for the manifest, by which the checkpoint is found again."""
        return {
            "generation": kept.generation,
            "saved_at": kept.saved_at,
            "metrics": dict(kept.metrics),
            "began": self._began,
        }

    def save(self, kept: KeptCheckpoint, write: Callable[[], object]) -> None:
        """Write a checkpoint, and apply the retention policy.

        Raises:
            FailedPreconditionError: Another process has acquired the right to write.
            Exception: An error of `write`.
        """
        self._directory_lock.require()
        try:
            write()
        except BaseException:
            with self._lock:  # the checkpoint may exist all the same, for example if a store's answer was lost
                if all(each.name != kept.name for each in self._kept or ()):
                    self._too_old.append(kept)
            raise
        self._note_saved(kept)

    def _note_saved(self, kept: KeptCheckpoint) -> None:
        """Record a saved checkpoint and remove old ones. Failed removals are tried again at the next saves."""
        with self._lock:
            found = [each for each in self._kept or () if each.name != kept.name] + [kept]
            too_old = self.retention.to_remove(found, self._began or 0.0)
            self._kept = [each for each in found if each not in too_old]
            left = [each for each in self._too_old if each.name != kept.name]
        left = self._not_removed([*too_old, *left])
        with self._lock:
            self._too_old = left

    def _not_removed(self, wanted: list[KeptCheckpoint]) -> list[KeptCheckpoint]:
        """Remove checkpoints until a removal fails (the store may be down); return the rest, the failed one last."""
        for number, each in enumerate(wanted):
            try:
                remove_checkpoint(self.files_of(each))
            except Exception as error:
                _log.warning(
                    "The checkpoint %r is not kept any more, but could not be removed: %s: %.300s. It is tried again "
                    "with the next saves.",
                    shown_uri(self.path_of(each)),
                    type(error).__name__,
                    error,
                )
                return [*wanted[number + 1 :], each]
        return []
