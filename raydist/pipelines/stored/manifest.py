"""The manifest of blocks in files: the spec of an element, and the number of elements in each chunk of each file.

The manifest is written last: without it, the directory counts as empty. It contains its own checksum.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from raydist.errors import SpecError
from raydist.nest import Structure, unflatten
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.formats.files import data_loss
from raydist.pipelines.stored.chunks import Chunk, crc32c
from raydist.pipelines.stored.containers import Container
from raydist.pipelines.stored.file_directory import is_file_name
from raydist.pipelines.stored.outline import outline_of, structure_of

__all__ = ["Manifest", "StoredFile"]

_VERSION = 2


@final
@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file with some of the elements.

    Attributes:
        name: Name in the manifest's directory.
        shard: Number of the shard of its elements.
        chunks: All chunks of the file, in order.
    """

    name: str
    shard: int
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes."""
        return sum(chunk.size for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        """Number of elements."""
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def blocks(self) -> list[Chunk]:
        """The chunks with elements."""
        return [chunk for chunk in self.chunks if chunk.rows]


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a directory.

    Attributes:
        structure: Structure of one element.
        specs: Specs of its leaves.
        container: Format of the files.
        parts: The files, in the order of their elements.
        origin: Identifies the data, such as a seed, to detect other data.
    """

    structure: Structure
    specs: tuple[TensorSpec, ...]
    container: Container
    parts: tuple[StoredFile, ...]
    origin: str = ""

    @property
    def num_rows(self) -> int:
        """Number of elements in all files."""
        return sum(part.num_rows for part in self.parts)

    @property
    def element_spec(self) -> Any:
        """Nest of TensorSpec of one element."""
        return unflatten(self.structure, self.specs)

    def shards(self) -> Iterator[tuple[StoredFile, ...]]:
        """Yield the files of each shard, by ascending shard."""
        for shard in sorted({part.shard for part in self.parts}):
            yield tuple(part for part in self.parts if part.shard == shard)

    def position(self, row: int) -> tuple[int, int, int]:
        """Return (file, chunk with elements, element in the chunk) of element `row`; (files, 0, 0) after the last."""
        for number, part in enumerate(self.parts):
            for block, chunk in enumerate(part.blocks):
                if row < chunk.rows:
                    return number, block, row
                row -= chunk.rows
        return len(self.parts), 0, 0

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON with a checksum."""
        content = {
            "version": _VERSION,
            "structure": outline_of(self.structure),
            "specs": [[spec.shape, _dtype_name(spec)] for spec in self.specs],
            "format": self.container.format,
            "compression": self.container.compression,
            "origin": self.origin,
            "parts": [{"name": part.name, "shard": part.shard, "chunks": part.chunks} for part in self.parts],
        }
        return json.dumps({"crc32c": crc32c(_canonical(content)), "saved": content}).encode()

    @classmethod
    def of_bytes(cls, data: bytes, path: str) -> Manifest:
        """Parse the result of `to_bytes` from the file at `path`. Raises DataLossError if it is damaged."""
        try:
            found = json.loads(data)
            content = found["saved"]
            if content["version"] != _VERSION:
                raise ValueError(f"its version is {content['version']!r}, this one reads {_VERSION}")
            checksum = crc32c(_canonical(content))
            if found["crc32c"] != checksum:
                raise ValueError(f"its checksum must be {checksum}, got {found['crc32c']!r:.100}")
            return cls._of_content(content)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, SpecError) as error:
            problem = (
                f"The manifest of saved elements must be intact, but {error!r}. Restore the directory or remove it"
            )
            raise data_loss(path, 0, problem) from error

    @classmethod
    def _of_content(cls, content: Any) -> Manifest:
        specs = tuple(TensorSpec(shape, dtype) for shape, dtype in content["specs"])
        structure = structure_of(content["structure"])
        if structure.num_leaves != len(specs):
            raise ValueError(f"it has {len(specs)} specs for {structure.num_leaves} leaves")
        parts = tuple(map(_stored_file, content["parts"]))
        if len({part.name for part in parts}) < len(parts):
            raise ValueError(f"it names a file twice, of {[part.name for part in parts]!r:.300}")
        container = Container.of(content["format"], content["compression"])
        return cls(structure, specs, container, parts, str(content["origin"]))


def _stored_file(part: Any) -> StoredFile:
    name, chunks = part["name"], tuple(Chunk(*map(int, chunk)) for chunk in part["chunks"])
    if not is_file_name(name):
        raise ValueError(f"it names {name!r:.100}, which is no file in its directory")
    if any(min(chunk) < 0 for chunk in chunks):
        raise ValueError(f"sizes must be >= 0, {name!r} has {chunks!r:.200}")
    return StoredFile(name, int(part["shard"]), chunks)


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _dtype_name(spec: TensorSpec) -> str:
    return {"S": "bytes", "U": "str"}.get(spec.dtype.kind, spec.dtype.name)
