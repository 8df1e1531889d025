from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raydist as rd
from raydist.core.errors import SpecError
from raydist.pipelines.elements.blocks import Block, object_column
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.stored import write
from raydist.pipelines.stored.containers import Container
from raydist.pipelines.stored.write import BlockSchema, block_of_batch, read_manifest, save_blocks
from tests.contracts.op import same

ARROW = Container.of("arrow", None)
NUMBER = rd.TensorSpec((), "int64")


def test_small_blocks_are_joined_and_large_ones_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "_CHUNK_BYTES", 80)
    blocks = [block_of_rows(list(range(size))) for size in (3, 4, 5, 30, 1)]
    save_blocks(tmp_path / "x", NUMBER, blocks, ARROW)
    (part,) = read_manifest(tmp_path / "x").parts
    assert [chunk.rows for chunk in part.blocks] == [12, 10, 10, 10, 1]


def test_a_file_ends_where_the_schema_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "_CHUNK_ROWS", 1)
    blocks = [block_of_rows([np.zeros(size)]) for size in (2, 2, 3, 2, 5)]
    save_blocks(tmp_path / "x", rd.TensorSpec((None,), "float64"), blocks, ARROW)
    manifest = read_manifest(tmp_path / "x")
    assert [part.num_rows for part in manifest.parts] == [2, 3]
    assert [x.shape[0] for x in rd.Dataset.load(tmp_path / "x")] == [2, 2, 3, 2, 5]


def test_shards(tmp_path: Path) -> None:
    blocks = [block_of_rows([1, 2, 3]), block_of_rows([4, 5])]
    save_blocks(tmp_path / "x", NUMBER, blocks, ARROW, lambda x: x % 2)
    manifest = read_manifest(tmp_path / "x")
    assert [(part.shard, part.num_rows) for part in manifest.parts] == [(0, 2), (1, 3)]


def failing(x: Any) -> int:
    raise KeyError(int(x))


@pytest.mark.parametrize(
    ("shard_func", "error", "message"),
    [
        (lambda x: 0.5, rd.SpecError, "must return one whole number, got 0.5"),
        (lambda x: "a", TypeError, "must return one whole number"),
        (lambda x: -1, rd.InvalidArgumentError, "a number >= 0, got -1"),
        (failing, KeyError, "2"),
    ],
)
def test_shard_functions_that_fail(tmp_path: Path, shard_func: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        save_blocks(tmp_path / "x", NUMBER, [block_of_rows([2])], ARROW, shard_func)
    assert list(tmp_path.iterdir()) == []


def test_too_many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "_MAX_SHARDS", 3)
    with pytest.raises(rd.InvalidArgumentError, match="at most 3 shards"):
        save_blocks(tmp_path / "x", NUMBER, [block_of_rows([0, 1, 2, 3])], ARROW, lambda x: x)
    assert list(tmp_path.iterdir()) == []


def test_elements_of_another_structure(tmp_path: Path) -> None:
    with pytest.raises(rd.SpecError, match="All elements must have the structure"):
        save_blocks(tmp_path / "x", NUMBER, [block_of_rows([(1, 2)])], ARROW)
    mixed: list[Block] = [block_of_rows([1]), block_of_rows([1.5])]
    with pytest.raises(rd.SpecError, match="All elements must have one dtype"):
        save_blocks(tmp_path / "x", NUMBER, mixed, ARROW)
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


@pytest.mark.parametrize("size", [1, 100_000])  # which is written when the file is closed; at once
def test_what_cannot_be_written_leaves_nothing_and_is_told_with_its_place(tmp_path: Path, size: int) -> None:
    with files_of_at_most(100), pytest.raises(OSError, match="File too large") as caught:
        save_blocks(tmp_path / "x", NUMBER, [block_of_rows(list(range(size)))], ARROW)
    assert str(tmp_path / "x") in "".join(caught.value.__notes__)
    assert list(tmp_path.iterdir()) == []


def rows(*values: Any) -> Block:
    return block_of_rows(list(values))


@pytest.mark.parametrize(
    "blocks",
    [
        [rows(np.zeros(2), np.ones(2)), rows(np.zeros(3))],
        [rows(np.zeros(2), np.ones(3)), rows(np.zeros(2), np.ones(2))],
        [rows(np.zeros((0, 2)))],
        [rows((1, "a")), rows((2, ""))],
        [rows(np.array(["a", "b"], object)), rows(np.array([], object).reshape(0))],
    ],
)
def test_what_is_laid_out_comes_back(blocks: list[Block]) -> None:
    schema = BlockSchema()
    found = [block_of_batch(schema.batch(block), block.structure) for block in blocks]
    for mine, theirs in zip(found, blocks, strict=True):
        assert same(mine.rows(), theirs.rows())


def test_a_leaf_that_had_two_shapes_has_one_schema_from_then_on() -> None:
    schema = BlockSchema()
    schemas = [schema.batch(rows(np.zeros(size))).schema for size in (2, 2, 3, 2, 5)]
    assert schemas[0] == schemas[1]
    assert schemas[1] != schemas[2]
    assert schemas[2] == schemas[3] == schemas[4]


def test_columns_are_dense_again() -> None:
    schema = BlockSchema()
    schema.batch(rows(np.zeros(2), np.zeros(3)))
    block = block_of_batch(schema.batch(rows(np.zeros(2), np.ones(2))), rows(1).structure)
    assert block.columns[0].tolist() == [[0, 0], [1, 1]]
    assert block.columns[0].dtype == np.float64


def test_other_elements() -> None:
    schema = BlockSchema()
    schema.batch(rows(1))
    with pytest.raises(SpecError, match="one structure and dtype"):
        schema.batch(rows(1.0))


def test_scalars_beside_arrays() -> None:
    schema = BlockSchema()
    schema.batch(rows(1))
    schema.batch(rows(np.zeros(2, np.int64)))
    with pytest.raises(SpecError, match="one rank"):
        schema.batch(rows(2))
    text = object_column(["a", np.array(["b"], object)])
    with pytest.raises(SpecError, match="one rank"):
        BlockSchema().batch(Block(rows("a").structure, rows("a").specs, (text,), 2))
