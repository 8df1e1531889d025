"""Every file format, found by its interface: one that has no entry in FORMATS fails here."""

from __future__ import annotations

import csv
import gzip
import inspect
import json
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raydist as rd
from raydist import pipelines
from raydist.pipelines.sources import columnar_files, row_lines
from raydist.pipelines.sources.columnar_files import ArrowFormat, ParquetFormat
from raydist.pipelines.sources.csv_files import CsvParser
from raydist.pipelines.sources.file_format import (
    FileFormat,
    FixedLengthFormat,
    TarFormat,
    TextLineFormat,
    TFRecordFormat,
)
from raydist.pipelines.sources.json_files import JsonParser
from raydist.pipelines.sources.numpy_files import NumpyFileOp
from raydist.pipelines.sources.row_lines import LineParser, RowLinesFormat
from raydist.pipelines.stored import write as stored_write
from raydist.pipelines.stored.read import SavedFormat
from tests.contracts.file_format import FileFormatCase, check_file_format
from tests.pipelines.formats.record_files import COMPRESS
from tests.pipelines.formats.test_tar_samples import write_tar

RECORDS = [b"record %d" % number for number in range(9)]
ROWS = [{"x": np.int64(number), "s": f"text {number}"} for number in range(9)]
NUMBERS = list(np.arange(9, dtype=np.int64) * 1000)
SCHEMA = pa.schema({"x": pa.int64(), "s": pa.string()})


def everything(content: bytes) -> slice:
    return slice(0, len(content))


def before_footer(content: bytes) -> slice:
    """Pages of a Parquet file: its footer has no checksum."""
    return slice(4, len(content) - 8 - int.from_bytes(content[-8:-4], "little"))


def member_data(content: bytes) -> slice:
    """The bytes of the only member of a zip file: what else there is has no checksum."""
    start = 30 + sum(int.from_bytes(content[at : at + 2], "little") for at in (26, 28))
    return slice(start, content.index(b"PK\x01\x02"))


def write_tfrecord(path: Path, records: Sequence[Any], compression: str | None = None) -> None:
    with rd.TFRecordWriter(path, compression) as writer:
        for record in records:
            writer.write(record)


def tfrecord(compression: str | None) -> FileFormatCase:
    read = partial(rd.TFRecordDataset, compression_type=compression)
    return FileFormatCase(
        partial(write_tfrecord, compression=compression),
        read,
        RECORDS,
        (partial(read, num_parallel_reads=rd.AUTOTUNE),),
        checked=everything,
        counted=False,
    )


def text_lines(compression: str | None) -> FileFormatCase:
    def write_lines(path: Path, lines: Sequence[Any]) -> None:
        path.write_bytes(COMPRESS[compression](b"".join(line + b"\n" for line in lines)))

    read = partial(rd.TextLineDataset, compression_type=compression)
    return FileFormatCase(write_lines, read, RECORDS, (partial(read, num_parallel_reads=rd.AUTOTUNE),))


def write_fixed(path: Path, records: Sequence[Any]) -> None:
    path.write_bytes(b"##" + b"".join(records) + b"!")


FIXED = FileFormatCase(
    write_fixed, partial(rd.FixedLengthRecordDataset, record_bytes=8, header_bytes=2, footer_bytes=1), RECORDS
)


def tar(suffix: str) -> FileFormatCase:
    def write(path: Path, rows: Sequence[Any]) -> None:
        write_tar(path, [(f"{row['__key__']}.{name}", row[name]) for row in rows for name in ("txt", "cls")])

    rows = [{"__key__": f"d/{number}", "txt": record, "cls": b"%d" % number} for number, record in enumerate(RECORDS)]
    read_ahead = (partial(rd.Dataset.from_tar, num_parallel_reads=rd.AUTOTUNE),)
    return FileFormatCase(write, partial(rd.Dataset.from_tar, members=["txt", "cls"]), rows, read_ahead, suffix)


def write_csv(path: Path, rows: Sequence[Any], open_text: Callable[..., Any] = open) -> None:
    with open_text(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, SCHEMA.names)
        writer.writeheader()
        writer.writerows(rows)


CSV = FileFormatCase(write_csv, partial(rd.Dataset.from_csv, column_types={"x": "int64", "s": str}), ROWS)
PACKED_CSV = replace(
    CSV,
    write=partial(write_csv, open_text=gzip.open),
    read=partial(rd.Dataset.from_csv, column_types={"x": "int64", "s": str}, compression_type="GZIP"),
)


def write_json(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps({"x": int(row["x"]), "s": row["s"]}) + "\n" for row in rows))


def table(rows: Sequence[Any]) -> pa.Table:
    return pa.Table.from_pylist([{"x": int(row["x"]), "s": row["s"]} for row in rows], SCHEMA)


def write_parquet(path: Path, rows: Sequence[Any]) -> None:
    pq.write_table(table(rows), path, row_group_size=2, write_page_checksum=True)


def write_arrow(path: Path, rows: Sequence[Any]) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(table(rows), max_chunksize=2)


def one_by_one(read: Callable[[str], rd.Dataset], paths: Sequence[str]) -> rd.Dataset:
    first, *others = map(read, paths)
    for other in others:
        first = first.concatenate(other)
    return first


def numpy_files(
    suffix: str, save: Callable[[Path, Any], None], checked: Callable[[bytes], slice] | None = None
) -> FileFormatCase:
    def write(path: Path, rows: Sequence[Any]) -> None:
        save(path, np.array([row["x"] if isinstance(row, dict) else row for row in rows], np.int64))

    elements = NUMBERS if suffix == ".npy" else [{"x": number} for number in NUMBERS]
    read = partial(one_by_one, rd.Dataset.from_numpy)
    return FileFormatCase(write, read, elements, suffix=suffix, checked=checked, remote=False)


def saved(file_format: str, compression: str | None) -> FileFormatCase:
    def save(path: Path, numbers: Sequence[Any]) -> None:
        dataset = rd.Dataset.from_tensor_slices(np.array(numbers, np.int64))
        dataset.save(path, compression, format=file_format)

    return FileFormatCase(save, partial(one_by_one, rd.Dataset.load), NUMBERS, checked=everything)


# By class: what `FileFormat` and `LineParser` are the interfaces of, and arrays mapped into memory.
FORMATS: dict[type, dict[str, FileFormatCase]] = {
    TFRecordFormat: {"plain": tfrecord(None), "gzip": tfrecord("GZIP"), "zlib": tfrecord("ZLIB")},
    TextLineFormat: {"plain": text_lines(None), "gzip": text_lines("GZIP")},
    FixedLengthFormat: {"plain": FIXED},
    TarFormat: {"plain": tar(".tar"), "gzip": tar(".tar.gz")},
    CsvParser: {"plain": CSV},
    RowLinesFormat: {"gzip": PACKED_CSV},
    JsonParser: {"plain": FileFormatCase(write_json, rd.Dataset.from_json, ROWS, empty_error="InvalidArgumentError")},
    ParquetFormat: {"plain": FileFormatCase(write_parquet, rd.Dataset.from_parquet, ROWS, checked=before_footer)},
    ArrowFormat: {"plain": FileFormatCase(write_arrow, rd.Dataset.from_arrow, ROWS)},
    NumpyFileOp: {
        "npy": numpy_files(".npy", np.save),
        "npz": numpy_files(".npz", lambda path, array: np.savez(path, x=array), checked=member_data),
        "compressed npz": numpy_files(
            ".npz", lambda path, array: np.savez_compressed(path, x=array), checked=member_data
        ),
    },
    SavedFormat: {
        "arrow": saved("arrow", None),
        "arrow zstd": saved("arrow", "ZSTD"),
        "parquet snappy": saved("parquet", "SNAPPY"),
    },
}
CASES = [
    pytest.param(case, id=f"{kind.__name__} {name}") for kind, cases in FORMATS.items() for name, case in cases.items()
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of some rows, so that a short file has several."""
    monkeypatch.setattr(columnar_files, "_SPLIT_BYTES", 1)
    monkeypatch.setattr(row_lines, "_MIN_LINES", 2)
    monkeypatch.setattr(stored_write, "_CHUNK_ROWS", 2)


@pytest.mark.parametrize("case", CASES)
def test_every_format_keeps_the_contract(case: FileFormatCase, tmp_path: Path) -> None:
    check_file_format(case, tmp_path)


def test_huge_row_groups_keep_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar_files, "_MAX_SPLIT_BYTES", 1)  # they are read in batches, one file after the other
    check_file_format(FORMATS[ParquetFormat]["plain"], tmp_path)


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def test_no_format_is_forgotten() -> None:
    for module in pkgutil.walk_packages(pipelines.__path__, "raydist.pipelines."):
        import_module(module.name)
    found = set(chain.from_iterable(map(_subclasses, (FileFormat, LineParser))))
    ours = {kind for kind in found if kind.__module__.startswith("raydist.") and not inspect.isabstract(kind)}
    missing = sorted(kind.__name__ for kind in ours - FORMATS.keys())
    assert not missing, f"FORMATS in {Path(__file__).name} needs an entry for {', '.join(missing)}: a FileFormatCase"
    assert all(FORMATS.values())
