"""The files of a checkpoint that is being written. File names are new, and the manifest is written last.

The directory may contain files of other origin: only files that certainly belong to a checkpoint are removed.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from raydist.errors import NotFoundError
from raydist.failpoints import failpoint
from raydist.pipelines.formats.files import ReadableFile
from raydist.pipelines.stored.directory_files import DirectoryFiles

__all__ = ["NewFiles", "is_new_name", "may_be_of_checkpoint", "new_files", "stem_of"]

MANIFEST_NAME = "manifest.json"

_READ_BYTES = 1 << 20
_MOST_CHARACTERS = 120  # of an object's name in a file's name
_TENSORS = re.compile(r"(.+?)(\.r[0-9a-f]{12}(?=[.-]))?(-[0-9]{5}-of-[0-9]{5})?\.safetensors(\.index\.json)?")
_TEMPORARY = re.compile(r"manifest\.json\.[0-9a-f]{32}\.tmp")


def may_be_of_checkpoint(name: str) -> bool:
    """Return True if a file name looks like a file of a checkpoint or a temporary file of a save.

    >>> [may_be_of_checkpoint(name) for name in ("model-00001-of-00002.safetensors", "manifest.json", "notes.txt")]
    [True, True, False]
    """
    return name == MANIFEST_NAME or any(each.fullmatch(name) for each in (_TENSORS, _TEMPORARY))


def is_new_name(name: str) -> bool:
    """Return True if a file name can only come from a save that replaces another checkpoint.

    >>> is_new_name("model.r0123456789ab.safetensors"), is_new_name("model.safetensors")
    (True, False)
    """
    found = _TENSORS.fullmatch(name)
    return _TEMPORARY.fullmatch(name) is not None if found is None else bool(found[2])


def stem_of(name: str) -> str | None:
    """Return the name that `NewFiles` made a file name from, or None for other file names.

    >>> stem_of("model.r0123456789ab-00001-of-00002.safetensors"), stem_of("manifest.json")
    ('model', None)
    """
    found = _TENSORS.fullmatch(name)
    return None if found is None else found[1]


@final
@dataclass(frozen=True, slots=True)
class NewFiles:
    """The names and the commit of one checkpoint's files. Small enough to send to every process that writes files.

    Attributes:
        files: Files of the checkpoint's directory.
        tag: Makes file names unique in a directory that contained a checkpoint before; otherwise empty.
    """

    files: DirectoryFiles
    tag: str = ""

    def named(self, name: str, ending: str) -> str:
        """Return a file name for `name` that any file system accepts. Different names may map to one file name.

        >>> from raydist.pipelines.stored.directory_files import LocalFiles
        >>> NewFiles(LocalFiles("/tmp/ckpt-1")).named("model", ".safetensors")
        'model.safetensors'
        """
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_MOST_CHARACTERS].lstrip(".-_") or "state"
        return f"{plain}{self.tag and f'.{self.tag}'}{ending}"

    def part_named(self, name: str, number: int, count: int) -> str:
        """Return the name of one of several files of `name`; the first is number 0.

        >>> from raydist.pipelines.stored.directory_files import LocalFiles
        >>> NewFiles(LocalFiles("/tmp/ckpt-1")).part_named("model", 0, 3)
        'model-00001-of-00003.safetensors'
        """
        return self.named(name, f"-{number + 1:05}-of-{count:05}.safetensors")

    def commit(self, manifest: bytes, kept: Iterable[str], before: Iterable[str] = ()) -> None:
        """Commit the checkpoint atomically, and remove the previous checkpoint.

        Args:
            manifest: Bytes of the manifest.
            kept: Names of the files in the new manifest.
            before: Names of the files in the previous manifest.
        """
        failpoint("checkpoint.before_manifest")
        self.files.sync()  # makes the names of the flushed files durable
        self.files.replace(MANIFEST_NAME, manifest)
        if self.tag:
            self._remove_old(set(before), {*kept, MANIFEST_NAME})

    def _remove_old(self, before: set[str], kept: set[str]) -> None:
        """Remove the files of the previous checkpoint and the leftovers of killed saves."""
        with contextlib.suppress(Exception):  # the checkpoint is committed; a later cleanup removes what stays
            for name in {*before, *filter(is_new_name, self.files.names())} - kept:
                self.files.remove(name)

    def abandon(self) -> None:
        """Remove the written files as far as possible. Keeps the previous checkpoint.

        Removes nothing if the manifest names the files: the failure may have come after the commit.
        """
        with contextlib.suppress(Exception):  # the user must see the original error
            if self._is_committed():
                return
            written = [name for name in self.files.names() if not self.tag or f".{self.tag}" in name]
            for name in written:
                self.files.remove(name)
            if not self.tag:
                self.files.remove_directory()

    def _is_committed(self) -> bool:
        try:
            opened = self.files.open(MANIFEST_NAME)
        except NotFoundError:
            return False
        try:
            return f".{self.tag}".encode() in _all_of(opened.file) if self.tag else True
        finally:
            opened.file.close()


def _all_of(file: ReadableFile) -> bytes:
    pieces = []
    while piece := file.read(_READ_BYTES):
        pieces.append(bytes(piece))
    return b"".join(pieces)


def new_files(directory: DirectoryFiles) -> NewFiles:
    """Create a directory for a checkpoint and return its `NewFiles`.

    Raises:
        FailedPreconditionError: The path is a file, or the directory must not be written to.
    """
    failpoint("checkpoint.before_files")
    # The letter distinguishes the tag from a time stamp in a user's file name.
    return NewFiles(directory, "" if directory.make() else f"r{uuid.uuid4().hex[:12]}")
