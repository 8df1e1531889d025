"""The manifest of blocks in files: the spec of an element, and the number of elements in each chunk of each file.

The manifest is written last: without it, the directory counts as empty. It contains its own checksum, and the structure
of an element as JSON. That names the classes of namedtuples and dataclasses, but nothing is imported: a class that the
program has imported, with the same fields, is used; otherwise a plain class of the same name and fields is made.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import LEAF, NOTHING, Structure, unflatten
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.formats.files import data_loss
from raydist.pipelines.stored.containers import Chunk, Container, crc32c
from raydist.pipelines.stored.file_directory import is_file_name

_VERSION = 2


def schema_of(structure: Structure) -> Any:
    """Return a structure as JSON.

    >>> schema_of(Structure(tuple, (0, 1), (LEAF, LEAF)))
    {'tuple': [None, None]}

    Raises:
        InvalidArgumentError: JSON cannot represent a part of the structure.
    """
    kind = structure.kind
    if kind is None:
        return None
    if structure == NOTHING:
        return {"none": []}
    children = [schema_of(child) for child in structure.children]
    if kind is tuple:
        return {"tuple": children}
    if not all(isinstance(key, str) for key in structure.keys):
        raise InvalidArgumentError(
            f"Elements of tuples, namedtuples, dataclasses and of dicts with text keys can be saved, got {structure}. "
            "Map them to a dict with text keys first."
        )
    named = dict(zip(structure.keys, children, strict=True))
    if kind is dict:
        return {"dict": named, **({"shown": list(structure.shown)} if structure.shown else {})}
    form = "namedtuple" if issubclass(kind, tuple) else "dataclass"
    return {form: named, "class": [kind.__module__, kind.__qualname__]}


def structure_of(schema: Any) -> Structure:
    """Return the structure from which :func:`schema_of` made `schema`.

    Raises:
        ValueError: `schema` is invalid. (Or AttributeError, KeyError, TypeError.)
    """
    if schema is None:
        return LEAF
    if schema == {"none": []}:
        return NOTHING
    form = next(form for form in ("tuple", "dict", "namedtuple", "dataclass", None) if form is None or form in schema)
    if form is None:
        raise ValueError(f"it has an unknown structure {schema!r:.100}")
    children = schema[form]
    if form == "tuple":
        return Structure(tuple, tuple(range(len(children))), tuple(map(structure_of, children)))
    inner = tuple(map(structure_of, children.values()))
    if form == "dict":
        return Structure(dict, tuple(children), inner, _permutation(schema.get("shown", []), len(inner)))
    module, name = schema["class"]
    return Structure(_class_of(form, str(module), str(name), tuple(children)), tuple(children), inner)


def _permutation(shown: Any, count: int) -> tuple[int, ...]:
    if shown and sorted(shown) != list(range(count)):
        raise ValueError(f"it shows the {count} keys of a dict in the order {shown!r:.100}")
    return tuple(shown)


def _class_of(form: str, module: str, name: str, fields: tuple[str, ...]) -> type:
    # Through the namespaces themselves: an attribute lookup may run code and import modules.
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if isinstance(found, type) and _fields(found) == (form, fields):
        return found
    return _made_class(form, name.rpartition(".")[2], fields)


def _fields(kind: type) -> tuple[str, tuple[str, ...]] | None:
    if issubclass(kind, tuple):
        return "namedtuple", tuple(getattr(kind, "_fields", ()))
    return ("dataclass", tuple(kind.__dataclass_fields__)) if dataclasses.is_dataclass(kind) else None


@functools.lru_cache(maxsize=256)  # so that two datasets from one directory share a class
def _made_class(form: str, name: str, fields: tuple[str, ...]) -> type:
    if form == "namedtuple":
        return collections.namedtuple(name, fields)
    return dataclasses.make_dataclass(name, fields)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file with some of the elements."""

    name: str  # name in the manifest's directory
    shard: int  # number of the shard of its elements
    chunks: tuple[Chunk, ...]  # all chunks of the file, in order

    @property
    def num_bytes(self) -> int:
        return sum(chunk.size for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def blocks(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.rows]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a directory."""

    structure: Structure  # structure of one element
    specs: tuple[TensorSpec, ...]  # specs of its leaves
    container: Container  # format of the files
    parts: tuple[StoredFile, ...]  # the files, in the order of their elements
    origin: str = ""  # identifies the data, such as a seed, to detect other data

    @property
    def num_rows(self) -> int:
        return sum(part.num_rows for part in self.parts)

    @property
    def element_spec(self) -> Any:
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
            "structure": schema_of(self.structure),
            "specs": [
                [spec.shape, {"S": "bytes", "U": "str"}.get(spec.dtype.kind, spec.dtype.name)] for spec in self.specs
            ],
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
