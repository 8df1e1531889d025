from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raydist.core.errors import DataLossError, InvalidArgumentError
from raydist.core.nest import flatten, unflatten
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.formats.files import OpenFile
from raydist.pipelines.stored.containers import Chunk, ChunkWriter, Container, crc32c
from raydist.pipelines.stored.manifest import Manifest, StoredFile, structure_of

NAMES = ("bool", "int8", "uint64", "float16", "float32", "complex128", "S", "U")
SPECS, STRUCTURE = flatten({name: (TensorSpec((None, 3), np.dtype(name)),) for name in NAMES})
CHUNKS = (Chunk(0, 8, 1, 0, 8), Chunk(8, 20, 2, 3, 40), Chunk(28, 10, 3, 2, 9), Chunk(38, 8, 4, 0, 8))
MANIFEST = Manifest(
    STRUCTURE,
    tuple(SPECS),
    Container("arrow", "GZIP"),
    (StoredFile("a", 0, CHUNKS), StoredFile("b", 0, CHUNKS), StoredFile("c", 7, CHUNKS)),
    "seed 5",
)


def test_every_damage_is_found() -> None:
    content = MANIFEST.to_bytes()
    assert Manifest.of_bytes(content, "x") == MANIFEST
    for at in range(len(content)):
        mutant = bytearray(content)
        mutant[at] ^= 1 << at % 8
        with contextlib.suppress(DataLossError):
            assert Manifest.of_bytes(bytes(mutant), "x") == MANIFEST
    cut = (content[:length] for length in range(len(content)))
    for wrong in (*cut, b"{}", b"[1]", b'{"saved": {"version": 9}}', b'{"saved": 3}', b"\xff"):
        with pytest.raises(DataLossError, match="manifest of saved elements must be intact"):
            Manifest.of_bytes(wrong, "x")
    found = json.loads(content)
    found["saved"]["origin"] = "seed 6"
    with pytest.raises(DataLossError, match="its checksum must be"):
        Manifest.of_bytes(json.dumps(found).encode(), "x")


ODD_NAMES: list[Any] = [
    *("../x", "..", ".", "", "/etc/passwd", "a/../../x", "a/b", "a\\b", "..\\x", "a\0b", "a\n", "C:x", "~", "-"),
    *("\u2024\u2024/x", "file:///x", "s3://b/x", "a" * 201, "\uff0e\uff0e", None, 3, ["a"]),
]


def test_names_and_sizes_that_cannot_be() -> None:
    """The checksum is right: whoever wrote it can make that."""
    for name in ODD_NAMES:
        with pytest.raises(DataLossError, match="which is no file in its directory"):
            Manifest.of_bytes(forged(lambda saved: saved["parts"][1].update(name=name)), "x")  # noqa: B023
    with pytest.raises(DataLossError, match="names a file twice"):
        Manifest.of_bytes(forged(lambda saved: saved["parts"][1].update(name="a")), "x")
    for place in range(5):
        with pytest.raises(DataLossError, match="sizes must be >= 0"):
            Manifest.of_bytes(forged(lambda saved: saved["parts"][1]["chunks"][0].__setitem__(place, -1)), "x")  # noqa: B023


def forged(change: Callable[[Any], None]) -> bytes:
    content = json.loads(MANIFEST.to_bytes())["saved"]
    change(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({"crc32c": crc32c(text), "saved": content}).encode()


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Example:
    image: Any
    at: Point


def test_saved_elements_are_of_their_classes(tmp_path: Path) -> None:
    dataset = Dataset.range(3).map(lambda x: {"z": Example(np.ones(2) * x, Point(x, 1)), "a": x})
    for form in ("arrow", "parquet"):
        dataset.save(str(tmp_path / form), format=form)
        found = list(Dataset.load(str(tmp_path / form)).as_numpy_iterator())
        assert [list(element) for element in found] == [["z", "a"]] * 3
        assert type(found[2]["z"]) is Example
        assert found[2]["z"].at == Point(2, 1)
        assert found[2]["z"].image.tolist() == [2.0, 2.0]


def test_unknown_classes_are_made_and_nothing_is_imported() -> None:
    schema = {"namedtuple": {"b": None, "a": None}, "class": ["antigravity", "Flight.Inner"]}
    structure = structure_of(schema)
    made = unflatten(structure, [1, 2])
    assert (made.b, made.a, type(made).__name__) == (1, 2, "Inner")
    assert "antigravity" not in sys.modules
    assert structure_of(schema) == structure
    schema = {"dataclass": {"b": None, "a": None}, "class": [__name__, "Example"]}  # it has other fields now
    made = unflatten(structure_of(schema), [1, 2])
    assert (made.b, made.a) == (1, 2)
    assert not isinstance(made, Example)


BATCHES = [pa.RecordBatch.from_pydict({"x": list(range(start, start + 100))}) for start in (0, 100)]


def written(container: Container) -> tuple[bytes, tuple[Chunk, ...]]:
    file = io.BytesIO()
    chunks = ChunkWriter(file, "x")
    writer = container.writer(chunks, BATCHES[0].schema)
    for batch in BATCHES:
        writer.write(batch)
    writer.finish()
    return file.getvalue(), tuple(chunks.chunks)


def test_other_tools_read_the_files(tmp_path: Path) -> None:
    table = pa.Table.from_batches(BATCHES)
    assert pa.ipc.open_stream(written(Container.of("arrow", None))[0]).read_all() == table
    for compression in ("GZIP", "ZSTD", "LZ4"):
        content = pa.BufferReader(written(Container.of("arrow", compression))[0])
        with pa.CompressedInputStream(content, compression.lower()) as stream:
            assert pa.ipc.open_stream(stream).read_all() == table
    (tmp_path / "x").write_bytes(written(Container.of("parquet", "ZSTD"))[0])
    assert pq.read_table(tmp_path / "x") == table
    wrong: list[Any] = [("arrow", "gzip"), ("arrow", "BROTLI"), ("csv", None), (None, None)]
    for arguments in wrong:
        with pytest.raises(InvalidArgumentError, match="must be"):
            Container.of(*arguments)


def test_chunks_that_cannot_be() -> None:
    container = Container.of("arrow", "ZSTD")
    content, chunks = written(container)
    bombs = tuple(chunk._replace(raw_size=1 << 62) if chunk.rows else chunk for chunk in chunks)
    reader = container.reader(OpenFile(io.BytesIO(content), None), "x", bombs)
    with pytest.raises(DataLossError, match="may have at most"):  # before anything is inflated
        reader.read(0)
    content, chunks = written(Container.of("arrow", None))
    with pytest.raises(DataLossError, match="must begin with its schema"):
        Container.of("arrow", None).reader(OpenFile(io.BytesIO(content), None), "x", chunks[1:])
