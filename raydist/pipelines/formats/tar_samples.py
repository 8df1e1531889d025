"""Samples of tar files: consecutive members whose names are equal up to the first dot.

A sample becomes one record: a line of JSON with its key and the names and sizes of its members, then their bytes. So
samples are read, resumed and moved like records, and `SampleMembers` splits them in a later stage.

Source: POSIX.1-2001 (ustar, pax), GNU tar; webdataset, `base_plus_ext` and `group_by_keys`.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raydist.core.errors import DataLossError, SpecError
from raydist.pipelines.formats.byte_streams import ByteStream
from raydist.pipelines.formats.files import data_loss
from raydist.pipelines.formats.records import CHUNK_BYTES, RecordReader, SkippedRecordError

_BLOCK = 512
_MAX_NAME_BYTES = 1 << 16
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


@dataclass
class _Sample:
    """The sample that is being read."""

    key: str
    start: int  # offset of its first header
    members: list[tuple[str, int]] = field(default_factory=list)  # name and size of each
    parts: list[bytes] = field(default_factory=list)  # bytes of all members
    problem: DataLossError | None = None  # error of the sample

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.members)

    def record(self, path: str) -> bytes:
        head = json.dumps({"key": self.key, "file": path, "members": self.members}).encode()
        return b"".join((head, b"\n", *self.parts))


class TarSampleReader(RecordReader):
    """A reader of samples.

    A sample with two members of one name, or with the key of an earlier sample, is skipped after its error.
    """

    def __init__(
        self, stream: ByteStream, *, offset: int = 0, index: int = 0, max_sample_bytes: int | None = None
    ) -> None:
        """Continue at `offset`, the start of sample `index`. `max_sample_bytes` defaults to the stream's limit."""
        super().__init__(stream, offset, index)
        self._at = offset
        self._limit = stream.piece_limit() if max_sample_bytes is None else max_sample_bytes
        self._sample: _Sample | None = None
        self._keys: set[str] = set()  # of the samples so far; 0.1 kB each

    def _advance(self, records: list[bytes], limit: int) -> None:
        found = self._next_sample()
        if found is not None and found.problem is not None:
            raise SkippedRecordError(found.problem)
        if found is not None:
            records.append(found.record(self._stream.path))

    def _next_sample(self) -> _Sample | None:
        """Return the next whole sample, which ends before a member of another sample or at the end."""
        while True:
            start = self._at
            header = self._next_header()
            if header is None:
                self._require_end()
                self.ended = True
                return self._finish(None, start)
            name = _NAME.fullmatch(header.name)
            if not header.isreg() or name is None or _META.match(header.name):
                size = 0 if not header.isreg() and header.type in tarfile.SUPPORTED_TYPES else header.size
                self._skip(size + -size % _BLOCK)
                continue
            key, sample, whole = name.group(1), self._sample, None
            if sample is None or sample.key != key:
                sample = _Sample(key, start, problem=self._repeated(key, start))
                whole = self._finish(sample, start)
            self._read_member(header, name.group(2).lower(), sample)
            if whole is not None:
                return whole

    def _finish(self, following: _Sample | None, start: int) -> _Sample | None:
        """Return the current sample, which ends at `start`, and begin the following one."""
        whole, self._sample = self._sample, following
        self.offset = start
        if whole is not None:
            self.index += 1
            self._keys.add(whole.key)
        return whole

    def _repeated(self, key: str, start: int) -> DataLossError | None:
        """Return the error of a sample with the key of an earlier sample in this file."""
        if key not in self._keys:
            return None
        return data_loss(
            self._stream.path,
            start,
            f"The members of a sample must be neighbours in a tar file, but {key!r} has some here and some before "
            "other samples. Write the file again in the order of names (tar --sort=name)",
        )

    def _read_member(self, header: tarfile.TarInfo, member: str, sample: _Sample) -> None:
        if sample.num_bytes + header.size > self._limit:
            raise self._loss(
                f"A sample may have at most {self._limit} bytes, but {sample.key!r} has {sample.num_bytes} and then "
                f"{header.size}. Raise max_sample_bytes if the file is right"
            )
        data = self._take(header.size, f"member {header.name!r}")
        self._take(-header.size % _BLOCK, f"the padding of member {header.name!r}")
        if any(name == member for name, _ in sample.members):
            problem = f"The members of a sample must have different names, but {sample.key!r} has two named {member!r}"
            sample.problem = data_loss(self._stream.path, sample.start, problem)
        else:
            sample.members.append((member, header.size))
            sample.parts.append(data)

    def _next_header(self) -> tarfile.TarInfo | None:
        """Return the next member's header, with the data of its extended headers; None at the end."""
        name: str | None = None
        size: int | None = None
        while True:
            header = self._header()
            if header is None:
                return None
            if header.type in _PAX:
                said = self._pax(header)
                name, size = said.get("path", name), int(said["size"]) if "size" in said else size
            elif header.type in _LONG_NAMES:
                text = self._extension(header).rstrip(b"\0").decode("utf-8", "backslashreplace")
                name = text if header.type == tarfile.GNUTYPE_LONGNAME else name
            elif header.type == tarfile.XGLTYPE:
                self._skip(header.size + -header.size % _BLOCK)
            else:
                header.name = header.name if name is None else name
                header.size = header.size if size is None else size
                return header

    def _header(self) -> tarfile.TarInfo | None:
        """Return the next block as a header; None for a block of zeros, which ends the file."""
        start = self._at
        block = self._take(_BLOCK, "the header of a member, or the block of zeros at the end")
        if not any(block):
            return None
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "backslashreplace")
        except (tarfile.HeaderError, ValueError) as error:
            self._at = start
            raise self._loss(f"A header of a tar file must be intact, but reading it fails: {error}") from error
        if header.size < 0 or header.type == tarfile.GNUTYPE_SPARSE:
            self._at = start
            raise self._loss(
                f"A member must be a plain file, got {header.name!r} (type {header.type!r}, {header.size} bytes)"
            )
        return header

    def _pax(self, header: tarfile.TarInfo) -> dict[str, str]:
        """Return the records of an extended header, "length key=value" each."""
        found, data = {}, self._extension(header)
        while data.strip(b"\0"):
            text, _, rest = data.partition(b" ")
            length = int(text) if text.isdigit() and len(text) < 9 else 0
            key, equals, value = rest[: max(0, length - len(text) - 2)].partition(b"=")
            if not equals or data[length - 1 : length] != b"\n":
                raise self._loss(f"A record of a pax header must be 'length key=value', got {data[:40]!r}")
            found[key.decode("utf-8", "backslashreplace")] = value.decode("utf-8", "backslashreplace")
            data = data[length:]
        if any(key.startswith("GNU.sparse") for key in found):
            raise self._loss(f"A member must be a plain file, got a sparse one ({found})")
        size = found.get("size", "0")
        if not size.isdigit() or len(size) > 18:
            raise self._loss(f"A size in a pax header must be a number, got {size!r:.40}")
        return found

    def _extension(self, header: tarfile.TarInfo) -> bytes:
        if header.size > _MAX_NAME_BYTES:
            raise self._loss(f"A name must have at most {_MAX_NAME_BYTES} bytes, got {header.size}")
        data = self._take(header.size, "an extended header")
        self._take(-header.size % _BLOCK, "the padding of an extended header")
        return data

    def _require_end(self) -> None:
        """Raise DataLossError unless only zeros follow. In a compressed file, reading them verifies the checksum."""
        while chunk := self._stream.read(CHUNK_BYTES):
            if chunk.strip(b"\0"):
                raise self._loss(
                    "A tar file must end with zeros, but other bytes follow a block of zeros. If several files were "
                    "joined, give them one by one"
                )

    def _take(self, size: int, what: str) -> bytes:
        """Return the next bytes. Memory is allocated as they arrive."""
        left = self._stream.bound()
        if left is not None and size > left:
            raise self._loss(f"A tar file must be complete, but {what} needs {size} bytes and at most {left} are left")
        parts = []
        missing = size
        while missing and (part := self._stream.read(min(missing, CHUNK_BYTES))):
            parts.append(part)
            missing -= len(part)
        if missing:
            raise self._loss(f"A tar file must be complete, but it ends {missing} bytes before the end of {what}")
        self._at += size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _skip(self, size: int) -> None:
        self._stream.skip(size)
        self._at += size

    def _loss(self, problem: str) -> DataLossError:
        return data_loss(self._stream.path, self._at, problem)


@dataclass(frozen=True)
class SampleMembers:
    """A function that splits a record into a dict of the sample's key and members."""

    names: Sequence[str] | None  # required members, without any others; None for all members of each sample

    def __call__(self, record: bytes) -> dict[str, Any]:
        end = record.index(b"\n") + 1
        head = json.loads(record[:end])
        members: dict[str, Any] = {}
        for name, size in head["members"]:
            members[name] = record[end : end + size]
            end += size
        names = members if self.names is None else self.names
        missing = [name for name in names if name not in members]
        if missing:
            raise SpecError(
                f"A sample must have the members {', '.join(names)}, but {head['key']!r} has {', '.join(members)} "
                f"(file {head['file']!r}). "
                "Drop it with ignore_errors(), or ask for fewer members=."
            )
        return {"__key__": head["key"], **{name: members[name] for name in names}}
