"""The files of a checkpoint that is being written: under names never used before, and the manifest last.

Its directory may hold what is somebody else's: nothing goes of which it is not sure that a checkpoint has written it.
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
_MOST_CHARACTERS = 120  # of an object's name in a file's
_TENSORS = re.compile(r"(.+?)(\.r[0-9a-f]{12}(?=[.-]))?(-[0-9]{5}-of-[0-9]{5})?\.safetensors(\.index\.json)?")
_TEMPORARY = re.compile(r"manifest\.json\.[0-9a-f]{32}\.tmp")


def may_be_of_checkpoint(name: str) -> bool:
    """Whether a file is called as those are that a checkpoint consists of, or is written by.

    >>> [may_be_of_checkpoint(name) for name in ("model-00001-of-00002.safetensors", "manifest.json", "notes.txt")]
    [True, True, False]
    """
    return name == MANIFEST_NAME or any(each.fullmatch(name) for each in (_TENSORS, _TEMPORARY))


def is_new_name(name: str) -> bool:
    """Whether a file is called as nobody calls one but a save where another checkpoint was.

    >>> is_new_name("model.r0123456789ab.safetensors"), is_new_name("model.safetensors")
    (True, False)
    """
    found = _TENSORS.fullmatch(name)
    return _TEMPORARY.fullmatch(name) is not None if found is None else bool(found[2])


def stem_of(name: str) -> str | None:
    """What `NewFiles` was to name, where a file is called as it names files.

    >>> stem_of("model.r0123456789ab-00001-of-00002.safetensors"), stem_of("manifest.json")
    ('model', None)
    """
    found = _TENSORS.fullmatch(name)
    return None if found is None else found[1]


@final
@dataclass(frozen=True, slots=True)
class NewFiles:
    """Where the files of one checkpoint go. Small: it travels to everybody who writes some of them.

    Attributes:
        files: Of its directory.
        tag: What makes names new where others may have been used there already.
    """

    files: DirectoryFiles
    tag: str = ""

    def named(self, name: str, ending: str) -> str:
        """The file of `name`, which is made one that any file system takes. Different names may become one.

        >>> from raydist.pipelines.stored.directory_files import LocalFiles
        >>> NewFiles(LocalFiles("/tmp/ckpt-1")).named("model", ".safetensors")
        'model.safetensors'
        """
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_MOST_CHARACTERS].lstrip(".-_") or "state"
        return f"{plain}{self.tag and f'.{self.tag}'}{ending}"

    def part_named(self, name: str, number: int, count: int) -> str:
        """One of several files of `name`; the first is number 0.

        >>> from raydist.pipelines.stored.directory_files import LocalFiles
        >>> NewFiles(LocalFiles("/tmp/ckpt-1")).part_named("model", 0, 3)
        'model-00001-of-00003.safetensors'
        """
        return self.named(name, f"-{number + 1:05}-of-{count:05}.safetensors")

    def commit(self, manifest: bytes, kept: Iterable[str], before: Iterable[str] = ()) -> None:
        """Let the checkpoint be there, in one step; what was there before is gone then.

        Args:
            manifest: Its bytes.
            kept: The files that it names.
            before: Those that the one names which is there.
        """
        failpoint("checkpoint.before_manifest")
        self.files.sync()  # the names of what was flushed
        self.files.replace(MANIFEST_NAME, manifest)
        if self.tag:
            self._remove_old(set(before), {*kept, MANIFEST_NAME})

    def _remove_old(self, before: set[str], kept: set[str]) -> None:
        """What the checkpoint before consisted of, and what killed saves left."""
        with contextlib.suppress(Exception):  # the checkpoint counts; who cleans up removes them later
            for name in {*before, *filter(is_new_name, self.files.names())} - kept:
                self.files.remove(name)

    def abandon(self) -> None:
        """Remove what was written, as far as possible. Leaves what was there before.

        Nothing goes where the manifest names it: what failed may have done so after that was there.
        """
        with contextlib.suppress(Exception):  # its own error is what the user must see
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
    """Files of a checkpoint in a directory, which is made.

    Raises:
        FailedPreconditionError: It is a file, or nothing may be written there.
    """
    failpoint("checkpoint.before_files")
    # The letter tells it from a time stamp, which users put there.
    return NewFiles(directory, "" if directory.make() else f"r{uuid.uuid4().hex[:12]}")
