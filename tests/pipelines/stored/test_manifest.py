from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raydist.errors import DataLossError
from raydist.nest import flatten
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.stored.chunks import Chunk, crc32c
from raydist.pipelines.stored.containers import Container
from raydist.pipelines.stored.manifest import Manifest, StoredFile

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


def test_it_comes_back() -> None:
    assert Manifest.of_bytes(MANIFEST.to_bytes(), "x") == MANIFEST


def test_numbers() -> None:
    assert (MANIFEST.num_rows, MANIFEST.parts[0].num_bytes) == (15, 46)
    assert [[part.name for part in parts] for parts in MANIFEST.shards()] == [["a", "b"], ["c"]]
    assert [MANIFEST.position(row) for row in (0, 2, 3, 5, 14, 15)] == [
        *((0, 0, 0), (0, 0, 2), (0, 1, 0)),
        *((1, 0, 0), (2, 1, 1), (3, 0, 0)),
    ]


def test_every_damage_is_found() -> None:
    content = MANIFEST.to_bytes()
    for at in range(len(content)):
        mutant = bytearray(content)
        mutant[at] ^= 1 << at % 8
        with contextlib.suppress(DataLossError):
            assert Manifest.of_bytes(bytes(mutant), "x") == MANIFEST
    for length in range(len(content)):
        with pytest.raises(DataLossError, match="manifest of saved elements must be intact"):
            Manifest.of_bytes(content[:length], "x")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"saved": {"version": 9}}', b'{"saved": 3}', b"\xff"])
def test_no_manifest(content: bytes) -> None:
    with pytest.raises(DataLossError, match="must be intact"):
        Manifest.of_bytes(content, "x")


def test_a_checksum_of_other_content() -> None:
    found = json.loads(MANIFEST.to_bytes())
    found["saved"]["origin"] = "seed 6"
    with pytest.raises(DataLossError, match="its checksum must be"):
        Manifest.of_bytes(json.dumps(found).encode(), "x")


ODD_ODD_NAMES = [
    *(
        "../x",
        "..",
        ".",
        "",
        "/etc/passwd",
        "a/../../x",
        "a/b",
        "a\\b",
        "..\\x",
        "a\0b",
        "a\n",
        "C:x",
        "\u2024\u2024/x",
    ),
    *("file:///x", "s3://b/x", "~", "-", "a" * 201, "\uff0e\uff0e", None, 3, ["a"]),
]


@pytest.mark.parametrize("name", ODD_ODD_NAMES, ids=repr)
def test_names_that_are_no_files_of_the_directory(name: Any) -> None:
    """The checksum is right: whoever wrote it can make that."""
    with pytest.raises(DataLossError, match="which is no file in its directory"):
        Manifest.of_bytes(forged(lambda saved: saved["parts"][1].update(name=name)), "x")


def test_a_file_twice_and_negative_sizes() -> None:
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
