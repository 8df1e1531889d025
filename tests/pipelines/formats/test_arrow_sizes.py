from __future__ import annotations

import io
import random

import numpy as np
import pyarrow as pa
import pytest

from raydist.pipelines.formats.arrow_sizes import ArrowSizes

TABLE = pa.table(
    {
        "x": np.arange(3000),
        "s": [f"text {i}" for i in range(3000)],
        "d": pa.array(["a", "b", "c"] * 1000).dictionary_encode(),
        "l": pa.array([[1.5] * (i % 3) for i in range(3000)]),
    }
)


def written(compression: str | None) -> bytes:
    file = io.BytesIO()
    with pa.ipc.new_file(file, TABLE.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(TABLE, max_chunksize=1000)
    return file.getvalue()


def sizes_of(content: bytes) -> ArrowSizes:
    return ArrowSizes(io.BytesIO(content), len(content))


def test_without_compression_all_stays_as_it_is() -> None:
    sizes = sizes_of(written(None))
    assert all(part.raw == part.stored for part in (*sizes.dictionaries(), *map(sizes.batch, range(3))))


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_batches(compression: str) -> None:
    content = written(compression)
    sizes, plain = sizes_of(content), sizes_of(written(None))
    assert len(sizes.dictionaries()) == 1
    for number in range(3):
        found, expected = sizes.batch(number), plain.batch(number)
        assert found.stored < found.raw
        assert expected.raw * 0.9 < found.raw <= expected.raw  # buffers of files are padded
        message = pa.ipc.read_message(pa.py_buffer(content[found.offset :]))
        assert (message.type, message.body.size) == ("record batch", found.stored)


def test_damage_is_a_value_error() -> None:
    content = written("zstd")
    draw = random.Random(0)
    wrong = 0
    for _ in range(2000):
        at = draw.randrange(len(content) - 1500, len(content)) if draw.random() < 0.7 else draw.randrange(2000)
        damaged = content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]
        try:
            sizes = sizes_of(damaged)
            assert len([sizes.dictionaries(), *map(sizes.batch, range(3))]) == 4
        except ValueError:
            wrong += 1
    assert wrong > 100
    for short in (b"", b"ARROW1", content[:100]):
        with pytest.raises(ValueError):  # noqa: PT011 - it depends on the place
            sizes_of(short)
