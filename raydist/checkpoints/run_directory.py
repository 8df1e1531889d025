"""The checkpoints of one run in one directory: which there are, which stay, and who may write."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, final

from raydist.checkpoints.lease import Lease
from raydist.checkpoints.removal import remove_checkpoint, remove_what_was_killed
from raydist.checkpoints.retention import KeptCheckpoint, Retention
from raydist.checkpoints.saved_ones import FoundCheckpoint, checkpoint_path, find_checkpoints, folders_of
from raydist.pipelines.formats.files import shown_uri
from raydist.pipelines.stored.directory_files import directory_files
from raydist.pipelines.stored.file_directory import DirectoryFiles

__all__ = ["RunDirectory"]

_log = logging.getLogger("raydist")


@final
class RunDirectory:
    """See the module. `save` may be called in another thread than the rest.

    Args:
        path: Of the directory, or a URI.
        name: What checkpoints are called before the number.
        retention: Which of them stay.

    Attributes:
        path: As it was given.
        retention: Likewise.
        name: Likewise.
    """

    def __init__(self, path: str, name: str, retention: Retention) -> None:
        self.path = path
        self.retention = retention
        self.name = name
        self._files = directory_files(path)
        self._lease = Lease(self._files)
        self._lock = threading.Lock()  # of what follows
        self._kept: list[KeptCheckpoint] | None = None  # while the lease is held
        self._too_old: list[KeptCheckpoint] = []  # that are to be removed, if they are there
        self._began: float | None = None
        self._generation = 0  # of the last save into the directory

    @property
    def is_ours(self) -> bool:
        """Whether this process is the one that may write."""
        return self._lease.is_taken

    def take(self) -> None:
        """Become the only writer, and remove what killed saves left.

        Raises:
            FailedPreconditionError: Another process writes into it: says which, and since when.
        """
        self._lease.take()
        remove_what_was_killed(self._files, folders_of(self._files, self.name))
        found = self.find()
        generations = [each.kept.generation for each in find_checkpoints(self._files) if each.damage is None]
        began = [each.details["began"] for each in found if isinstance(each.details.get("began"), int | float)]
        with self._lock:
            self._began = min(began, default=None)
            self._kept = [each.kept for each in found if each.damage is None]
            self._generation = max(generations, default=0)

    def require_ours(self) -> None:
        """FailedPreconditionError where another process has become the one that may write."""
        self._lease.require()

    def give_back(self) -> None:
        """Let others write."""
        with self._lock:
            self._kept = None
        self._lease.give_back()

    def find(self) -> list[FoundCheckpoint]:
        """All checkpoints, damaged ones too, in the order of their saves. Reads the directory."""
        return find_checkpoints(self._files, self.name)

    def path_of(self, kept: KeptCheckpoint) -> str:
        """Of a checkpoint."""
        return checkpoint_path(self.path, kept.name)

    def path_to(self, number: int) -> str:
        """Of the checkpoint that has, or is to have, this number."""
        return checkpoint_path(self.path, f"{self.name}-{number}")

    def files_of(self, kept: KeptCheckpoint) -> DirectoryFiles:
        """Of a checkpoint, which need not exist."""
        return self._files.inside(kept.name)

    def newest(self) -> list[str]:
        """Paths of the newest ones, as many as stay, oldest first."""
        return [self.path_of(each) for each in self.retention.newest(self._all())]

    def best(self) -> str | None:
        """Path of the best one."""
        best = None if self.retention.best is None else self.retention.best.of(self._all())
        return None if best is None else self.path_of(best)

    def _all(self) -> list[KeptCheckpoint]:
        with self._lock:
            if self._kept is not None:
                return list(self._kept)
        return [each.kept for each in self.find() if each.damage is None]

    def begin(self, number: int, metrics: dict[str, float]) -> KeptCheckpoint:
        """What is about to be saved: newer than all that was."""
        now = time.time()
        with self._lock:
            self._began = now if self._began is None else self._began
            self._generation += 1  # also of what cannot be written
            return KeptCheckpoint(f"{self.name}-{number}", number, self._generation, now, metrics)

    def details_of(self, kept: KeptCheckpoint) -> Mapping[str, Any]:
        """What its manifest must say, so that it is found as it is."""
        return {
            "generation": kept.generation,
            "saved_at": kept.saved_at,
            "metrics": dict(kept.metrics),
            "began": self._began,
        }

    def save(self, kept: KeptCheckpoint, write: Callable[[], object]) -> None:
        """Have a checkpoint written, and count it.

        Args:
            kept: Of `begin`.
            write: Does it.

        Raises:
            FailedPreconditionError: Another process has become the one that may write.
            Exception: What `write` raises.
        """
        self.require_ours()
        try:
            write()
        except BaseException:
            with self._lock:  # it may be there all the same: the answer of a store was lost, say
                if all(each.name != kept.name for each in self._kept or ()):
                    self._too_old.append(kept)
            raise
        self._note_saved(kept)

    def _note_saved(self, kept: KeptCheckpoint) -> None:
        """It counts now, and others may have to go: those that cannot be removed now go with one of the next saves."""
        with self._lock:
            found = [each for each in self._kept or () if each.name != kept.name] + [kept]
            too_old = self.retention.to_remove(found, self._began or 0.0)
            self._kept = [each for each in found if each not in too_old]
            left = [each for each in self._too_old if each.name != kept.name]
        left = self._not_removed([*too_old, *left])
        with self._lock:
            self._too_old = left

    def _not_removed(self, wanted: list[KeptCheckpoint]) -> list[KeptCheckpoint]:
        """Remove checkpoints up to the first that cannot be: the store may be down. Those that are left; it last."""
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
