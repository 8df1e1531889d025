from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd
from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from tests.pipelines.formats.record_files import example, framed


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


def test_parses_in_batches(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [example(x=[i], y=[float(i)]) for i in range(5)])
    features = {"x": rd.FixedLenFeature((), "int64"), "y": rd.FixedLenFeature((1,), "float32")}
    dataset = rd.TFRecordDataset(path).batch(2).map(lambda batch: rd.parse_example(batch, features))
    assert [batch["x"].tolist() for batch in dataset] == [[0, 1], [2, 3], [4]]
    assert [tuple(batch["y"].shape) for batch in dataset] == [(2, 1), (2, 1), (1, 1)]
    one_by_one = rd.TFRecordDataset(path).map(lambda record: rd.parse_example(record, features))
    assert [int(element["x"]) for element in one_by_one] == [0, 1, 2, 3, 4]


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


@pytest.mark.parametrize(
    ("types", "shapes", "spec"),
    [
        ("int64", (), TensorSpec((), "int64")),
        (torch.int64, None, TensorSpec(None, "int64")),
        (np.int64, torch.Size([]), TensorSpec((), "int64")),
    ],
)
def test_a_generator_described_by_types_and_shapes(types: Any, shapes: Any, spec: TensorSpec) -> None:
    ds = Dataset.from_generator(range, args=[3], output_types=types, output_shapes=shapes)
    assert ds.element_spec == spec
    assert [x.tolist() for x in ds.batch(2)] == [[0, 1], [2]]


def test_types_and_shapes_are_nests() -> None:
    def pairs() -> Any:
        yield {"x": [1.0, 2.0], "y": (1, "a")}
        yield {"x": [3.0], "y": (2, "b")}

    types = {"x": "float32", "y": ("int32", str)}
    ds = Dataset.from_generator(pairs, output_types=types, output_shapes={"x": (None,), "y": ((), ())})
    assert ds.element_spec == {"x": TensorSpec((None,)), "y": (TensorSpec((), "int32"), TensorSpec((), "U"))}
    assert [len(element["x"]) for element in ds] == [2, 1]
    unknown = Dataset.from_generator(pairs, output_types=types)
    assert unknown.element_spec["x"] == TensorSpec(None)
    assert [x.shape for x in unknown.map(lambda e: e["x"]).padded_batch(2)] == [(2, 2)]


def test_types_and_shapes_that_do_not_fit() -> None:
    spec = TensorSpec((), "int64")
    with pytest.raises(InvalidArgumentError, match="output_signature, or output_types with output_shapes, got both"):
        Dataset.from_generator(range, spec, output_types="int64")
    with pytest.raises(InvalidArgumentError, match=r"output_shapes must be a nest like the element, \('\*', '\*'\)"):
        Dataset.from_generator(range, output_types=("int64", "int64"), output_shapes=((),))
    with pytest.raises(InvalidArgumentError, match="output_types must be a nest of dtypes.* got 'words'"):
        Dataset.from_generator(range, output_types="words")
    with pytest.raises(InvalidArgumentError, match="got 'int64' and 3"):
        Dataset.from_generator(range, output_types="int64", output_shapes=3)
    with pytest.raises(SpecError, match=r"nest of rd.TensorSpec, got a leaf torch.int64. Dtypes alone: output_types="):
        Dataset.from_generator(range, torch.int64)
    with pytest.raises(SpecError, match="needs output_signature"):
        Dataset.from_generator(range, output_shapes=())
