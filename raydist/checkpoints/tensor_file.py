"""The files of a checkpoint that is being written: their names, safetensors content, and the commit.

File names are new, and the manifest is written last. The directory may contain files of other origin: only files that
certainly belong to a checkpoint are removed.

Tensors are written in pieces: no second copy of a tensor in memory, and a checksum of each tensor. Any reader of
safetensors can read the files. Large states are split into several files with an index, numbered as by Hugging Face. If
no process has a whole tensor, slices of its rows are stored as `<tensor>[<first row>:<end row>]`.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, final

import google_crc32c
import torch

from raydist.checkpoints.entries import dtype_name
from raydist.collectives.tensors import flat_bytes
from raydist.core.errors import NotFoundError
from raydist.core.failpoints import failpoint
from raydist.pipelines.formats.files import ReadableFile
from raydist.pipelines.stored.directory_files import DirectoryFiles

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
    """The names and the commit of one checkpoint's files. Small enough to send to every process that writes files."""

    files: DirectoryFiles  # files of the checkpoint's directory
    tag: str = ""  # makes file names unique in a directory that contained a checkpoint before; otherwise empty

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
        """Commit the checkpoint atomically, and remove the previous checkpoint."""
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


MAX_PART_BYTES = 5 * 10**9
"""Maximum bytes of tensors in one file; the default of Hugging Face."""

_PIECE_BYTES = 1 << 18  # computing a checksum holds the GIL: 0.2 ms at a time, while training steps run
_ALIGNMENT = 8  # of the first tensor: safetensors pads its header to this


@final
@dataclass(frozen=True, slots=True)
class RowRange:
    """A range of rows of a tensor."""

    start: int  # the first row
    stop: int  # the row after the last
    of: int  # number of rows of the whole tensor


@final
@dataclass(frozen=True, slots=True)
class FilePlace:
    """The location of a tensor, or of a slice of one, in a file."""

    dtype: str  # safetensors name of the dtype
    shape: tuple[int, ...]  # shape of the whole tensor
    begin: int  # offset of the first byte in the file
    end: int  # offset after the last byte
    crc32c: int  # checksum of the bytes
    rows: tuple[int, int] | None = None  # (first row, row after the last) for a slice; None for the whole tensor

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return self.end - self.begin

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of the slice, or of the whole tensor if it is not divided."""
        return self.shape if self.rows is None else (self.rows[1] - self.rows[0], *self.shape[1:])


@final
@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file as it was written."""

    name: str  # name in the directory
    num_bytes: int  # size of the file
    crc32c: int  # checksum of the whole file
    header_bytes: int  # size of the header before the tensors
    header_crc32c: int  # checksum of the header
    # locations of the file's tensors by name; empty for an index
    tensors: dict[str, FilePlace] = field(default_factory=dict)


def plan_parts(sizes: Mapping[str, int], max_part_bytes: int = MAX_PART_BYTES) -> list[list[str]]:
    """Divide tensors, in order, into files: each takes as many tensors as fit, and at least one.

    >>> plan_parts({"a": 3, "b": 3, "c": 9, "d": 1}, 6)
    [['a', 'b'], ['c'], ['d']]
    """
    parts: list[list[str]] = []
    room = -1
    for name, size in sizes.items():
        if size > room:
            parts.append([])
            room = max_part_bytes
        parts[-1].append(name)
        room -= size
    return parts or [[]]


def write_tensors(
    new: NewFiles, name: str, tensors: Mapping[str, torch.Tensor], max_part_bytes: int = MAX_PART_BYTES
) -> tuple[TensorFile, ...]:
    """Write tensors into as many files as needed, and an index if there are several."""
    parts = plan_parts({key: tensor.nbytes for key, tensor in tensors.items()}, max_part_bytes)
    if len(parts) == 1:
        return (write_tensor_file(new, new.named(name, ".safetensors"), tensors),)
    files = tuple(
        write_tensor_file(new, new.part_named(name, number, len(parts)), {key: tensors[key] for key in keys})
        for number, keys in enumerate(parts)
    )
    return (*files, write_index(new, name, files))


def write_index(new: NewFiles, name: str, files: tuple[TensorFile, ...]) -> TensorFile:
    """Write the Hugging Face index of one state's files, which maps tensors to files."""
    total = sum(place.end - place.begin for file in files for place in file.tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {
            _name_in_file(key, place.rows): file.name for file in files for key, place in file.tensors.items()
        },
    }
    content = json.dumps(index, indent=2).encode()
    target = new.named(name, ".safetensors.index.json")
    new.files.write(target, lambda file: file.write(content))
    crc = google_crc32c.value(content)
    return TensorFile(target, len(content), crc, len(content), crc)


def write_tensor_file(
    new: NewFiles,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    rows: Mapping[str, RowRange] | None = None,
) -> TensorFile:
    """Write one file with exactly this name."""
    return new.files.write(name, lambda file: write_safetensors(file, name, tensors, rows))


def write_safetensors(
    file: BinaryIO,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    rows: Mapping[str, RowRange] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> TensorFile:
    """Write tensors into an open file."""
    rows = rows or {}
    order = sorted(tensors, key=lambda key: -tensors[key].element_size())  # so that all tensors are aligned
    ordered = {key: tensors[key] for key in order}
    writer = _Writer(file)
    header = _header(ordered, rows, metadata or {"format": "pt"})
    header_crc = writer.write(memoryview(header))
    places = {}
    for key, tensor in ordered.items():
        begin, cut = writer.at, rows.get(key)
        flat: Any = flat_bytes(tensor.detach().cpu()).numpy()
        crc = writer.write(memoryview(flat))
        shape = tuple(tensor.shape) if cut is None else (cut.of, *tensor.shape[1:])
        places[key] = FilePlace(dtype_name(tensor.dtype), shape, begin, writer.at, crc, _first_and_end(cut))
    return TensorFile(name, writer.at, writer.crc, len(header), header_crc, places)


def _header(tensors: Mapping[str, torch.Tensor], rows: Mapping[str, RowRange], metadata: Mapping[str, str]) -> bytes:
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for key, tensor in tensors.items():
        dtype, shape = dtype_name(tensor.dtype), list(tensor.shape)
        name = _name_in_file(key, _first_and_end(rows.get(key)))
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _first_and_end(rows: RowRange | None) -> tuple[int, int] | None:
    return None if rows is None else (rows.start, rows.stop)


def _name_in_file(key: str, rows: tuple[int, int] | None) -> str:
    return key if rows is None else f"{key}[{rows[0]}:{rows[1]}]"


@final
class _Writer:
    """A file with a running checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc = self.at = 0

    def write(self, data: memoryview) -> int:
        """Append bytes and return their checksum."""
        crc = 0
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            self._file.write(piece)
            self.at += len(piece)
            content = bytes(piece)  # the package needs bytes; a piece stays in the CPU cache
            crc = google_crc32c.extend(crc, content)
            self.crc = google_crc32c.extend(self.crc, content)
            failpoint("checkpoint.within_file")
        return crc
