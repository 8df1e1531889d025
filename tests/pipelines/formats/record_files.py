"""Record files and messages for tests, made from the formats' definitions alone."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from raydist.pipelines.formats.byte_streams import open_stream
from raydist.pipelines.formats.tfrecord import TFRecordReader
from raydist.pipelines.tf_example.parse import example_class

COMPRESS: dict[str | None, Callable[[bytes], bytes]] = {None: bytes, "GZIP": gzip.compress, "ZLIB": zlib.compress}
KIND_OF_TYPE = {bytes: "bytes_list", float: "float_list", int: "int64_list"}


def crc32c(data: bytes) -> int:
    """CRC-32C bit by bit (RFC 3720, appendix B.4): slow and independent of the library's."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    rotated = ((crc >> 15) | (crc << 17)) & 0xFFFFFFFF
    return ((rotated + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def framed(*records: bytes) -> bytes:
    """A TFRecord file."""
    out = b""
    for record in records:
        length = len(record).to_bytes(8, "little")
        out += length + masked(length) + record + masked(record)
    return out


def read_all(path: Path, compression: str | None = None, **options: Any) -> tuple[list[bytes], list[Exception]]:
    """Every record and every error of a file."""
    reader = TFRecordReader(open_stream(str(path), compression), **options)
    records: list[bytes] = []
    errors: list[Exception] = []
    while not reader.ended:
        found, error = reader.read(7)
        records += found
        errors += [] if error is None else [error]
    reader.close()
    return records, errors


def example(**features: Sequence[Any] | None) -> bytes:
    """A serialized tf.train.Example; None makes a feature without a kind."""
    message = example_class()()
    for name, values in features.items():
        feature = message.features.feature[name]
        if values is not None:
            kind = KIND_OF_TYPE[type(values[0])] if values else "int64_list"
            getattr(feature, kind).SetInParent()
            getattr(feature, kind).value.extend(values)
    serialized: bytes = message.SerializeToString(
        deterministic=True
    )  # else the order of features is another one in each process
    return serialized
