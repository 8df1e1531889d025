"""Files of records, and their names."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raydist as rd
from raydist.pipelines.formats.tfrecord import TFRecordReader
from raydist.pipelines.sources.file_format import TFRecordFormat
from tests.contracts.op import check_op, collect, is_error
from tests.pipelines.formats.record_files import COMPRESS, framed
from tests.real_data import real_file


def write(path: Path, records: Sequence[bytes], compression: str | None = None) -> str:
    path.write_bytes(COMPRESS[compression](framed(*records)))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """[0, 1, 2], [3, 4], [] and [5]."""
    contents = [[b"0", b"1", b"2"], [b"3", b"4"], [], [b"5"]]
    return [write(tmp_path / f"{i}.tfrecord", content) for i, content in enumerate(contents)]


def test_one_file_after_the_other(files: list[str]) -> None:
    assert list(rd.TFRecordDataset(files)) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert list(rd.TFRecordDataset(Path(files[1]))) == [b"3", b"4"]
    assert list(rd.TFRecordDataset(np.array(files[:1]))) == [b"0", b"1", b"2"]
    assert list(rd.TFRecordDataset(files[2])) == []
    names = rd.Dataset.from_tensor_slices(files[:2]).repeat(2)
    assert list(rd.TFRecordDataset(names)) == [b"0", b"1", b"2", b"3", b"4"] * 2
    check_op(lambda: rd.TFRecordDataset(names, num_parallel_reads=2))
    with pytest.raises(rd.SpecError, match=r"must have elements of str, got .*0"):
        next(iter(rd.TFRecordDataset(rd.Dataset.range(1))))


def test_errors_stand_at_their_place(tmp_path: Path, files: list[str]) -> None:
    damaged = tmp_path / "damaged"
    content = bytearray(framed(b"a", b"b", b"c"))
    content[17 + 12] ^= 1  # the data of b"b"
    damaged.write_bytes(content)
    cut = tmp_path / "cut"
    cut.write_bytes(framed(b"d", b"e")[:-1])
    missing = str(tmp_path / "missing")
    names = [str(damaged), missing, str(cut), files[3], str(tmp_path)]
    found = collect(rd.TFRecordDataset(names).as_numpy_iterator())
    assert [one if isinstance(one, bytes) else one[0] for one in found] == [
        *(b"a", "DataLossError", b"c", "NotFoundError", b"d", "DataLossError", b"5", "InvalidArgumentError")
    ]
    assert found[1][1].endswith(f"record 1 is damaged (file {str(damaged)!r}, byte 17).")
    assert repr(missing) in found[3][1]
    assert found[5][1].endswith(f"record 1 is damaged (file {str(cut)!r}, byte 17).")
    for cycle in (1, 2, 5):
        check_op(partial(rd.TFRecordDataset, names, num_parallel_reads=cycle))


def test_data_loss_carries_file_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(framed(b"abc") + b"junk")
    iterator = iter(rd.TFRecordDataset(str(path)))
    assert next(iterator) == b"abc"
    state = iterator.state_dict()
    with pytest.raises(rd.DataLossError, match="header must have 12 bytes, but the file ends after 4") as caught:
        next(iterator)
    assert (caught.value.path, caught.value.offset) == (str(path), 19)
    assert list(iterator) == []
    path.write_bytes(b"")
    resumed = iter(rd.TFRecordDataset(str(path)))
    resumed.load_state_dict(state)
    with pytest.raises(rd.DataLossError, match="must reach byte 19, where reading is to go on, but it has 0 bytes"):
        next(resumed)
    plain, packed = write(tmp_path / "a", [b"x"]), write(tmp_path / "b", [b"x"], "GZIP")
    with pytest.raises(rd.DataLossError, match="Was the file written with compression_type='ZLIB'"):
        next(iter(rd.TFRecordDataset(plain, "ZLIB")))
    with pytest.raises(rd.DataLossError, match="try compression_type='GZIP'"):
        next(iter(rd.TFRecordDataset(packed)))
    with pytest.raises(rd.DataLossError, match="this one looks compressed .*: try compression_type='GZIP'"):
        next(iter(rd.TextLineDataset(packed)))


@pytest.mark.parametrize("reads", [None, 2])
def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, reads: int | None) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        Path(path).write_bytes(framed(bytes(5000)) * 2000)
    iterator = rd.TFRecordDataset(paths, num_parallel_reads=reads).as_numpy_iterator()
    next(iterator)
    for path in paths:
        os.truncate(path, 5_000_000)
    found = collect(iterator)
    losses = [item[1] for item in found if is_error(item)]
    assert len(losses) == 2
    assert all(repr(path) in text for path, text in zip(paths, losses, strict=True))
    assert "must keep its size while it is read" in losses[0]
    assert len(found) < 2500


def test_round_trip_of_what_tensorflow_wrote(tmp_path: Path) -> None:
    original = real_file("criteo_sample.te.tfrecords")
    features: dict[str, Any] = {
        "label": rd.FixedLenFeature((), "float32"),
        **{f"C{i}": rd.FixedLenFeature((), "int64") for i in range(1, 27)},
    }
    with rd.TFRecordWriter(tmp_path / "copy") as writer:
        for record in rd.TFRecordDataset(original).as_numpy_iterator():
            writer.write(record)
    assert (tmp_path / "copy").read_bytes() == original.read_bytes()
    copies = rd.TFRecordDataset(tmp_path / "copy").batch(64).map(lambda batch: rd.parse_example(batch, features))
    batches = list(copies.as_numpy_iterator())
    alone = [rd.parse_example(record, features) for record in rd.TFRecordDataset(original).as_numpy_iterator()]
    for key in features:
        assert np.concatenate([batch[key] for batch in batches]).tolist() == [one[key] for one in alone]


def test_fixed_records(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(COMPRESS["ZLIB"](b"##aaabbbccc!"))
    records = [record for record in (b"aaa", b"bbb", b"ccc") for _ in range(2)]
    check_op(lambda: rd.FixedLengthRecordDataset([path] * 2, 3, 2, 1, "ZLIB", num_parallel_reads=2), records)
    path.write_bytes(b"ab")
    with pytest.raises(rd.DataLossError, match="must reach byte 3"):
        next(iter(rd.FixedLengthRecordDataset(path, 2, header_bytes=3)))
    with pytest.raises(rd.DataLossError, match="a footer of 3, but 2 bytes follow 0 whole records"):
        next(iter(rd.FixedLengthRecordDataset(path, 2, footer_bytes=3)))
    for sizes, message in (
        ((0, 0, 0), "record_bytes must be >= 1, got 0"),
        ((1, -1, 0), "header_bytes and footer_bytes must be >= 0, got -1 and 0"),
        ((1, 0, -2), "must be >= 0, got 0 and -2"),
    ):
        with pytest.raises(rd.InvalidArgumentError, match=message):
            rd.FixedLengthRecordDataset("x", *sizes)


def test_files_are_read_at_the_same_time_and_ahead_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(tmp_path / name, [name.encode()] * 3) for name in "abcd"]
    meeting = threading.Barrier(4)
    threads = set()
    make, read = TFRecordFormat.reader, TFRecordReader.read

    def meet(*arguments: Any) -> Any:
        meeting.wait(20)
        return make(*arguments)

    def noted(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        return read(*arguments)

    monkeypatch.setattr(TFRecordFormat, "reader", meet)
    assert b"".join(rd.TFRecordDataset(paths, num_parallel_reads=4)) == b"abcd" * 3
    monkeypatch.setattr(TFRecordFormat, "reader", make)
    monkeypatch.setattr(TFRecordReader, "read", noted)
    iterator = iter(rd.TFRecordDataset(paths[:2], num_parallel_reads=rd.AUTOTUNE))
    assert next(iterator) == b"a"
    assert b"".join(iterator) == b"aabbb"
    assert threads == {"raydist-TFRecordDataset-1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "c.csv", "d.txt"):
        (tmp_path / name).touch()
    return tmp_path


def test_sorted_names(folder: Path) -> None:
    names = [str(folder / name) for name in ("a.txt", "b.txt", "d.txt")]
    check_op(lambda: rd.Dataset.list_files(f"{folder}/*.txt", shuffle=False), list(names))
    check_op(lambda: rd.Dataset.list_files([folder / "?.txt", folder / "[ab].*"], shuffle=False), list(names))
    dataset = rd.Dataset.list_files(f"file://{folder}/*.txt", shuffle=False)
    assert list(dataset) == [f"file://{name}" for name in names]
    assert dataset.element_spec == rd.TensorSpec((), str)
    assert len(dataset) == 3


def test_shuffled_by_default(folder: Path) -> None:
    for number in range(20):
        (folder / f"{number}.txt").touch()
    dataset = rd.Dataset.list_files(f"{folder}/*.txt", seed=1)
    first, second = collect(dataset.as_numpy_iterator()), collect(dataset.as_numpy_iterator())
    assert first != second
    assert sorted(first) == sorted(second) == sorted(map(str, folder.glob("*.txt")))
    assert collect(rd.Dataset.list_files(f"{folder}/*.txt", seed=1).as_numpy_iterator()) == first
    check_op(lambda: rd.Dataset.list_files(f"{folder}/*.txt"))


def test_feeds_a_reader_and_an_error_among_names_takes_its_place(folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"x\n")
    (folder / "d.txt").write_bytes(b"y\n")
    names = rd.Dataset.list_files(f"{folder}/*.txt", shuffle=False)
    check_op(lambda: rd.TextLineDataset(names), [b"x", b"y"])
    broken = rd.Dataset.from_tensor_slices([1, 0, 2]).map(lambda x: f"{folder}/{'ad'[2 // int(x) - 1]}.txt")
    error = ("ZeroDivisionError", "integer division or modulo by zero")
    for reads in (1, 2):
        check_op(lambda: rd.TextLineDataset(broken, num_parallel_reads=reads), [b"y", error, b"x"])  # noqa: B023


def test_nothing_matches(tmp_path: Path) -> None:
    with pytest.raises(rd.NotFoundError, match=r"none matches '.*/\*\.txt'"):
        rd.Dataset.list_files(f"{tmp_path}/*.txt")
    with pytest.raises(rd.InvalidArgumentError, match="at least one pattern, got an empty list"):
        rd.Dataset.list_files([])
    with pytest.raises(rd.InvalidArgumentError, match="one that fsspec knows, got 'nosuch://x/\\*'"):
        rd.Dataset.list_files("nosuch://x/*")
    with pytest.raises(rd.SpecError, match="got 3"):
        rd.Dataset.list_files(3)
