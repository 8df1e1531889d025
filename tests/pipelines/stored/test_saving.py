from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raydist as rd
from raydist.core.errors import DataLossError, FailedPreconditionError, InvalidArgumentError
from raydist.core.nest import flatten, unflatten
from raydist.dataset import Dataset
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.formats.files import OpenFile
from raydist.pipelines.stored import write
from raydist.pipelines.stored.containers import Chunk, ChunkWriter, Container, crc32c
from raydist.pipelines.stored.manifest import Manifest, StoredFile, structure_of
from raydist.pipelines.stored.read import checked_manifest
from raydist.pipelines.stored.write import NewDirectory, remove_remains, save_blocks
from tests.contracts.op import check_op, collect, same

SOURCES: dict[str, rd.Dataset] = {
    "numbers": rd.Dataset.range(9),
    "nothing": rd.Dataset.range(0),
    "nests": rd.Dataset.from_tensor_slices(
        ({"x": np.eye(5), "b": np.eye(5) > 0}, ["a", "", "c", "d", "e"], [b"x"] * 5)
    ),
    "ragged": rd.Dataset.range(5).map(lambda n: (np.arange(n), np.array(["t"] * int(n), object))),
    "batches": rd.Dataset.from_tensor_slices(["a", "b", "c"]).batch(2),
    "complex": rd.Dataset.from_tensor_slices(np.array([1j, 2, 3 + 1j], np.complex64)),
    "no values": rd.Dataset.from_tensor_slices(np.zeros((3, 0, 2), np.uint64)),
}
KEPT = [("arrow", None), ("arrow", "GZIP"), ("parquet", None), ("parquet", "ZSTD")]


@pytest.mark.parametrize(("file_format", "compression"), KEPT)
def test_what_is_saved_is_loaded(tmp_path: Path, file_format: str, compression: str | None) -> None:
    for name, source in SOURCES.items():
        source.save(tmp_path / name, compression=compression, format=file_format)
        loaded = rd.Dataset.load(tmp_path / name)
        assert same(collect(loaded.as_numpy_iterator()), collect(source.as_numpy_iterator())), name
        assert loaded.element_spec == source.element_spec, name
    assert {path.name for path in tmp_path.iterdir()} == SOURCES.keys()


def test_a_state_for_any_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "_CHUNK_ROWS", 2)
    SOURCES["nests"].save(tmp_path / "y")
    check_op(lambda: rd.Dataset.load(tmp_path / "y"))


def test_shards_and_readers(tmp_path: Path) -> None:
    rd.Dataset.range(7).map(lambda x: (x, str(x))).save(tmp_path / "x", shard_func=lambda x, text: x % 3)
    assert [int(x) for x, _ in rd.Dataset.load(tmp_path / "x")] == [0, 3, 6, 1, 4, 2, 5]
    in_turn = rd.Dataset.load(tmp_path / "x", reader_func=lambda shards: shards.interleave(lambda shard: shard, 3))
    assert [int(x) for x, _ in in_turn] == [0, 1, 2, 3, 4, 5, 6]
    check_op(lambda: rd.Dataset.load(tmp_path / "x", reader_func=lambda shards: shards.flat_map(lambda shard: shard)))
    wrong: Any = len
    with pytest.raises(TypeError):
        rd.Dataset.load(tmp_path / "x", reader_func=wrong)


def test_bad_paths_arguments_and_elements(tmp_path: Path) -> None:
    dataset = rd.Dataset.range(3)
    with pytest.raises(rd.NotFoundError, match="must exist"):
        rd.Dataset.load(tmp_path / "missing")
    with pytest.raises(rd.FailedPreconditionError, match="does not exist yet"):
        dataset.save(tmp_path)
    with pytest.raises(rd.NotFoundError):
        dataset.save(tmp_path / "no" / "parent")
    with pytest.raises(rd.InvalidArgumentError, match="compression must be None or one of"):
        dataset.save(tmp_path / "x", compression="gzip")
    numbered: Any = {1: np.arange(2)}
    with pytest.raises(rd.InvalidArgumentError, match="dicts with text keys can be saved"):
        rd.Dataset.from_tensor_slices(numbered).save(tmp_path / "x")
    with pytest.raises(ZeroDivisionError):
        dataset.map(lambda x: 1 // (2 - int(x))).save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("file_format", "compression"), KEPT)
def test_damage_costs_one_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_format: str, compression: str | None
) -> None:
    monkeypatch.setattr(write, "_CHUNK_ROWS", 15)
    rd.Dataset.range(40).save(tmp_path / "x", compression=compression, format=file_format)
    (file,) = tmp_path.glob("x/part-*")
    content = file.read_bytes()
    first_chunk, second, *_ = checked_manifest(tmp_path / "x").parts[0].blocks
    at, first = second.offset + second.size // 2, first_chunk.rows
    file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
    found = collect(rd.Dataset.load(tmp_path / "x").as_numpy_iterator())
    assert found[first][0] == "DataLossError"
    assert f"(file {str(file)!r}, byte " in found.pop(first)[1]
    assert found == [*range(first), *range(first + second.rows, 40)]
    for other in (content[:-1], content + b"x", b""):
        file.write_bytes(other)
        with pytest.raises(rd.DataLossError, match=f"must have the {len(content)} bytes of the manifest"):
            next(iter(rd.Dataset.load(tmp_path / "x")))


def test_another_compression_than_was_used(tmp_path: Path) -> None:
    rd.Dataset.range(3).save(tmp_path / "x", compression="LZ4")
    assert len(rd.Dataset.load(tmp_path / "x", compression="LZ4")) == 3
    for wrong in ("GZIP", ""):
        with pytest.raises(rd.DataLossError, match="but it was saved with 'LZ4'"):
            rd.Dataset.load(tmp_path / "x", compression=wrong)


def test_links_that_lead_outside(tmp_path: Path) -> None:
    path, outside = tmp_path / "x", tmp_path / "outside"
    rd.Dataset.range(5).save(path)
    (tmp_path / "y").symlink_to(path)
    assert len(list(rd.Dataset.load(tmp_path / "y"))) == 5  # the directory itself may be linked
    (part,) = (entry for entry in path.iterdir() if entry.name != "manifest.json")
    part.rename(path / "moved")
    part.symlink_to("moved")
    assert len(list(rd.Dataset.load(path))) == 5
    (path / "moved").rename(outside)
    part.unlink()
    part.symlink_to(outside)
    with pytest.raises(rd.InvalidArgumentError, match=f"must lie in it, but '{part}' is a link to '{outside}'"):
        list(rd.Dataset.load(path))
    (path / "manifest.json").rename(tmp_path / "other")
    (path / "manifest.json").symlink_to("../other")
    with pytest.raises(rd.InvalidArgumentError, match="is a link to"):
        rd.Dataset.load(path)


def test_a_chunk_that_would_take_all_memory(tmp_path: Path) -> None:
    """An element of 64 MB that takes 2 KB in its file."""
    zeros = rd.Dataset.from_tensors(np.zeros(1 << 23))
    zeros.save(tmp_path / "x", compression="ZSTD")
    with pytest.raises(
        rd.DataLossError, match="at most 33554432 bytes, but .* are to become .*max_chunk_bytes"
    ) as caught:
        list(rd.Dataset.load(tmp_path / "x"))
    assert caught.value.offset is not None
    assert len(list(rd.Dataset.load(tmp_path / "x", max_chunk_bytes=1 << 27))) == 1
    for _ in range(2):  # what raydist wrote for itself is read as it is
        assert len(list(zeros.snapshot(tmp_path / "y", compression="ZSTD"))) == 1


ARROW = Container.of("arrow", None)
NUMBER = rd.TensorSpec((), "int64")


def failing(x: Any) -> int:
    raise KeyError(int(x))


def test_shard_functions_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "_MAX_SHARDS", 3)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda x: 0.5, rd.SpecError, "must return one whole number, got 0.5"),
        (lambda x: "a", TypeError, "must return one whole number"),
        (lambda x: -1, rd.InvalidArgumentError, "a number >= 0, got -1"),
        (failing, KeyError, "2"),
        (lambda x: x, rd.InvalidArgumentError, "at most 3 shards"),
    ]
    for shard_func, error, message in cases:
        with pytest.raises(error, match=message):
            save_blocks(tmp_path / "x", NUMBER, [block_of_rows([2, 1, 0, 3])], ARROW, shard_func)
        assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Inside, no file of this process grows beyond that: the system says so as it does of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_cannot_be_written_leaves_nothing_and_is_told_with_its_place(tmp_path: Path) -> None:
    for size in (1, 100_000):  # which is written when the file is closed; at once
        with files_of_at_most(100), pytest.raises(OSError, match="File too large") as caught:
            save_blocks(tmp_path / "x", NUMBER, [block_of_rows(list(range(size)))], ARROW)
        assert str(tmp_path / "x") in "".join(caught.value.__notes__)
        assert list(tmp_path.iterdir()) == []


def put(directory: NewDirectory, name: str, content: bytes) -> None:
    file = directory.create(f"{directory.prefix}{name}")
    file.write(content)
    directory.finish(file)


def names_in(path: str) -> list[str]:
    system, inner = fsspec.core.url_to_fs(path)
    return [name.rpartition("/")[2] for name in system.find(inner)]


@pytest.fixture(params=["local", "remote"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "x") if request.param == "local" else f"memory://{uuid.uuid4().hex}/x"


def test_of_two_writers_the_first_wins_and_the_other_leaves_nothing(target: str) -> None:
    first, second = NewDirectory(target), NewDirectory(target)
    put(first, "a", b"first")
    put(second, "a", b"second")
    first.commit(b"1")
    kept = sorted([f"{first.prefix}a", "manifest.json"])
    with pytest.raises(FailedPreconditionError):
        second.commit(b"2")
    assert sorted(names_in(target)) == kept
    with fsspec.open(f"{target}/{first.prefix}a") as file:
        assert file.read() == b"first"


def test_remains_of_a_crash_are_removed_and_a_directory_of_somebody_else_is_not(tmp_path: Path) -> None:
    crashed, other = NewDirectory(tmp_path / "x"), NewDirectory(tmp_path / "y")
    put(crashed, "a", b"data")
    put(other, "a", b"data")
    remove_remains(str(tmp_path / "x"))
    assert [path.name.split(".")[1] for path in tmp_path.iterdir()] == ["y"]
    remove_remains(str(tmp_path / "missing" / "x"))
    (tmp_path / "y").mkdir()
    with pytest.raises(FailedPreconditionError, match="does not exist yet"):
        other.commit(b"1")
    assert [entry.name for entry in tmp_path.iterdir()] == ["y"]


# --- the manifest -----------------------------------------------------------------------------------------------------

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
