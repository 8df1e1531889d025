from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest

import raydist as rd
from tests.pipelines.formats.record_files import example, framed
from tests.real_data import real_file


def write(path: Path, records: list[bytes]) -> str:
    path.write_bytes(framed(*records))
    return str(path)


def test_what_the_writer_wrote_is_read(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.tfrecord" for i in range(2)]
    for path in paths:
        with rd.TFRecordWriter(path, "GZIP") as writer:
            writer.write(path.name.encode())
    assert list(rd.TFRecordDataset(paths, "GZIP")) == [b"0.tfrecord", b"1.tfrecord"]
    assert list(rd.TFRecordDataset(rd.Dataset.from_tensor_slices([str(p) for p in paths]), "GZIP", 2)) == [
        b"0.tfrecord",
        b"1.tfrecord",
    ]


def test_reads_a_uri() -> None:
    with rd.TFRecordWriter("memory://in/x.tfrecord") as writer:
        writer.write(b"abc")
    assert list(rd.TFRecordDataset("memory://in/x.tfrecord")) == [b"abc"]
    fsspec.filesystem("memory").rm("/in", recursive=True)


def test_parses_in_batches(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [example(x=[i], y=[float(i)]) for i in range(5)])
    features = {"x": rd.FixedLenFeature((), "int64"), "y": rd.FixedLenFeature((1,), "float32")}
    dataset = rd.TFRecordDataset(path).batch(2).map(lambda batch: rd.parse_example(batch, features))
    assert [batch["x"].tolist() for batch in dataset] == [[0, 1], [2, 3], [4]]
    assert [tuple(batch["y"].shape) for batch in dataset] == [(2, 1), (2, 1), (1, 1)]
    one_by_one = rd.TFRecordDataset(path).map(lambda record: rd.parse_example(record, features))
    assert [int(element["x"]) for element in one_by_one] == [0, 1, 2, 3, 4]


def test_reads_files_of_tensorflow() -> None:
    paths = [str(real_file("criteo_sample.tr.tfrecords")), str(real_file("criteo_sample.te.tfrecords"))]
    features = {"label": rd.FixedLenFeature((), "float32"), "C10": rd.FixedLenFeature((), "int64")}
    for reads in (None, 2):
        dataset = rd.TFRecordDataset(paths, num_parallel_reads=reads).map(lambda r: rd.parse_example(r, features))
        labels = [float(element["label"]) for element in dataset]
        assert len(labels) == 200
        assert set(labels) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((["x"], "BZIP"), rd.InvalidArgumentError, "must be None, 'GZIP' or 'ZLIB', got 'BZIP'"),
        ((["x"], None, 0), rd.InvalidArgumentError, "num_parallel_reads must be >= 1, AUTOTUNE or None, got 0"),
        (([],), rd.InvalidArgumentError, "must name at least one file"),
        ((3,), rd.SpecError, "A file name must be a str, bytes or os.PathLike, got 3"),
        (([3],), TypeError, "A file name must be"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        rd.TFRecordDataset(*arguments)


def test_bad_record_limit() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="max_record_bytes must be >= 1, got 0"):
        rd.TFRecordDataset("x", max_record_bytes=0)


def test_limits_are_settings(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": "' + "x" * 600_000 + '"}\n')
    readers: list[Any] = [
        lambda **options: rd.TextLineDataset(path, **options),
        lambda **options: rd.Dataset.from_json(path, **options),
        lambda **options: rd.Dataset.from_csv(path, column_names=["a"], **options),
    ]
    for read in readers[:2]:
        assert len(list(read())) == 1
    for read in readers:
        with pytest.raises(rd.DataLossError, match="at most 1000 bytes.*Raise max_line_bytes"):
            list(read(max_line_bytes=1000))
        with pytest.raises(rd.InvalidArgumentError, match="max_line_bytes must be >= 1"):
            read(max_line_bytes=0)
