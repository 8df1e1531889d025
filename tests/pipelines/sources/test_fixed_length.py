from __future__ import annotations

from pathlib import Path

import pytest

import raydist as rd
from tests.contracts.op import check_op, collect
from tests.pipelines.formats.record_files import COMPRESS


@pytest.mark.parametrize("compression", COMPRESS)
def test_records(tmp_path: Path, compression: str | None) -> None:
    (tmp_path / "x").write_bytes(COMPRESS[compression](b"##aaabbbccc!"))
    paths = [tmp_path / "x"] * 2
    check_op(
        lambda: rd.FixedLengthRecordDataset(paths, 3, 2, 1, compression),
        [b"aaa", b"bbb", b"ccc", b"aaa", b"bbb", b"ccc"],
    )
    check_op(lambda: rd.FixedLengthRecordDataset(paths, 3, 2, 1, compression, num_parallel_reads=2))


def test_errors_stand_at_their_place(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"abcd")
    (tmp_path / "cut").write_bytes(b"efg")
    (tmp_path / "empty").write_bytes(b"")
    names = [tmp_path / "missing", tmp_path / "cut", tmp_path / "empty", tmp_path, tmp_path / "good"]
    dataset = rd.FixedLengthRecordDataset(names, 2)
    found = collect(dataset.as_numpy_iterator())
    assert [item if isinstance(item, bytes) else item[0] for item in found] == [
        *("NotFoundError", b"ef", "DataLossError", "InvalidArgumentError"),
        *(b"ab", b"cd"),
    ]
    assert found[2][1].endswith(f"1 bytes are left behind record 0 (file {str(tmp_path / 'cut')!r}, byte 2).")
    check_op(lambda: rd.FixedLengthRecordDataset(names, 2))


def test_a_file_without_its_header(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"ab")
    with pytest.raises(rd.DataLossError, match="must reach byte 3"):
        next(iter(rd.FixedLengthRecordDataset(tmp_path / "x", 2, header_bytes=3)))


def test_properties(tmp_path: Path) -> None:
    dataset = rd.FixedLengthRecordDataset("x", 2)
    assert dataset.element_spec == rd.TensorSpec((), bytes)
    assert dataset.cardinality() == rd.UNKNOWN_CARDINALITY


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 0, 0), "record_bytes must be >= 1, got 0"),
        ((1, -1, 0), "header_bytes and footer_bytes must be >= 0, got -1 and 0"),
        ((1, 0, -2), "must be >= 0, got 0 and -2"),
    ],
)
def test_bad_sizes(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        rd.FixedLengthRecordDataset("x", *sizes)
