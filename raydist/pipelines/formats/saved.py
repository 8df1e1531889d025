"""Saved datasets: a directory with one file of batches and a manifest.

Batches are Arrow IPC streams, each framed like a TFRecord: its length and its content have checksums. The manifest says
what an element is, how many there are, and how long the file is.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import pyarrow as pa

from raydist.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.nest import LEAF, Structure, flatten
from raydist.pipelines.arrow import block_of_arrow, block_to_arrow
from raydist.pipelines.blocks import Block
from raydist.pipelines.formats.files import data_loss, file_errors, local_path, open_file, path_text
from raydist.pipelines.formats.tfrecord import frame
from raydist.pipelines.spec import TensorSpec

__all__ = ["DATA_FILE", "Manifest", "block_of_bytes", "read_manifest", "save_blocks"]

DATA_FILE = "data.arrow-records"
_MANIFEST_FILE = "manifest.json"
_VERSION = 1
_MAX_MANIFEST_BYTES = 1 << 24


@final
@dataclass(frozen=True)
class Manifest:
    """What a saved dataset holds.

    Attributes:
        structure: Of one element.
        specs: Of its leaves.
        num_rows: Elements.
        num_bytes: Of the data file.
    """

    structure: Structure
    specs: tuple[TensorSpec, ...]
    num_rows: int
    num_bytes: int


def save_blocks(path: Any, element_spec: Any, blocks: Iterable[Block]) -> None:
    """Write a new directory. It appears under its name when everything in it has reached the disk."""
    target = _directory(path)
    specs, structure = flatten(element_spec)
    outline = _outline(structure)
    if os.path.lexists(target):
        raise FailedPreconditionError(f"save needs a path that does not exist yet, got {target!r}. Remove it first.")
    parent, name = os.path.split(os.path.abspath(target))
    temporary = os.path.join(parent, f".{name}.{uuid.uuid4().hex}.tmp")
    with file_errors(parent):
        os.mkdir(temporary)
    try:
        num_rows, num_bytes = _write_data(os.path.join(temporary, DATA_FILE), structure, blocks)
        content = {
            "version": _VERSION,
            "structure": outline,
            "specs": [[spec.shape, _dtype_name(spec)] for spec in specs],
            "num_rows": num_rows,
            "num_bytes": num_bytes,
        }
        _write(os.path.join(temporary, _MANIFEST_FILE), json.dumps(content).encode())
        _sync_directory(temporary)
        os.rename(temporary, target)
        _sync_directory(parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_manifest(path: Any) -> Manifest:
    """The manifest of the directory at `path`. NotFoundError where there is none, DataLossError where it is damaged."""
    file = os.path.join(_directory(path), _MANIFEST_FILE)
    opened = open_file(file)
    try:
        with file_errors(file):
            text = opened.file.read(_MAX_MANIFEST_BYTES) or b""
    finally:
        opened.file.close()
    try:
        found = json.loads(text)
        if found["version"] != _VERSION:
            raise ValueError(f"its version is {found['version']!r}, this one reads {_VERSION}")
        specs = tuple(TensorSpec(shape, dtype) for shape, dtype in found["specs"])
        structure = _structure(found["structure"])
        if structure.num_leaves != len(specs):
            raise ValueError(f"it has {len(specs)} specs for {structure.num_leaves} leaves")
        return Manifest(structure, specs, int(found["num_rows"]), int(found["num_bytes"]))
    except (ValueError, TypeError, KeyError, RecursionError, SpecError) as error:
        raise data_loss(file, 0, f"The manifest of a saved dataset must be intact, but {error!r}") from error


def block_of_bytes(data: bytes, structure: Structure) -> Block:
    """The block that one record of the data file holds."""
    with pa.ipc.open_stream(data) as stream:
        batch = stream.read_next_batch()
    batch.validate(full=True)
    return block_of_arrow(batch, structure)


def _directory(path: Any) -> str:
    text = path_text(path)
    local = local_path(text)
    if local is None:
        raise InvalidArgumentError(f"A dataset is saved in a directory with a local path, got {text!r}.")
    return local


def _write_data(path: str, structure: Structure, blocks: Iterable[Block]) -> tuple[int, int]:
    num_rows = 0
    with file_errors(path), open(path, "xb") as file:
        for block in blocks:
            if block.structure != structure:
                raise SpecError(f"All elements must have the structure {structure}, got {block.structure}.")
            file.write(frame(_bytes_of_block(block)))
            num_rows += block.num_rows
        file.flush()
        os.fsync(file.fileno())
        return num_rows, file.tell()


def _bytes_of_block(block: Block) -> bytes:
    batch = block_to_arrow(block)
    with pa.BufferOutputStream() as stream:
        with pa.ipc.new_stream(stream, batch.schema) as writer:
            writer.write_batch(batch)
        content: bytes = stream.getvalue().to_pybytes()
    return content


def _write(path: str, content: bytes) -> None:
    with file_errors(path), open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _dtype_name(spec: TensorSpec) -> str:
    return {"S": "bytes", "U": "str"}.get(spec.dtype.kind, spec.dtype.name)


def _outline(structure: Structure) -> Any:
    """A structure as JSON."""
    if structure.kind is None:
        return None
    children = [_outline(child) for child in structure.children]
    if structure.kind is tuple:
        return {"tuple": children}
    if structure.kind is dict and all(isinstance(key, str) for key in structure.keys):
        return {"dict": dict(zip(structure.keys, children, strict=True))}
    raise InvalidArgumentError(
        f"Elements of tuples and of dicts with text keys can be saved, got {structure}. Map them to a dict first."
    )


def _structure(outline: Any) -> Structure:
    if outline is None:
        return LEAF
    ((kind, children),) = outline.items()
    if kind == "tuple":
        return Structure(tuple, tuple(range(len(children))), tuple(map(_structure, children)))
    if kind == "dict":
        return Structure(dict, tuple(children), tuple(map(_structure, children.values())))
    raise ValueError(f"it has an unknown structure {kind!r}")
