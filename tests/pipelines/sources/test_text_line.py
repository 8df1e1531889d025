from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import raydist as rd
from tests.contracts.op import check_op, collect
from tests.pipelines.formats.record_files import COMPRESS


def test_lines_of_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\r\n\ntwo\rhalves\nlast")
    (tmp_path / "b").write_bytes(b"")
    (tmp_path / "c").write_bytes(b"\n")
    paths = [tmp_path / name for name in "abc"]
    expected = [b"one", b"", b"two\rhalves", b"last", b""]
    check_op(lambda: rd.TextLineDataset(paths), expected)
    assert list(rd.TextLineDataset(paths[0])) == expected[:4]
    assert list(rd.TextLineDataset([paths[0], paths[0]], num_parallel_reads=2))[:3] == [b"one", b"one", b""]


@pytest.mark.parametrize("compression", COMPRESS)
def test_resumes_in_compressed_files(tmp_path: Path, compression: str | None) -> None:
    lines = [b"%d" % i * i for i in range(15)]
    (tmp_path / "x").write_bytes(COMPRESS[compression](b"\n".join(lines)))
    for reads in (1, 2):
        check_op(partial(rd.TextLineDataset, [tmp_path / "x"] * 2, compression, reads))
    assert list(rd.TextLineDataset(tmp_path / "x", compression)) == lines


def test_properties(tmp_path: Path) -> None:
    dataset = rd.TextLineDataset(tmp_path / "x")
    assert dataset.element_spec == rd.TensorSpec((), bytes)
    assert dataset.cardinality() == rd.UNKNOWN_CARDINALITY
    assert "TextLineDataset-1: TextLineDataset(compression_type=None, files in turn: 1)" in dataset.explain()


def test_errors_stand_at_their_place(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"x\n")
    (tmp_path / "packed").write_bytes(COMPRESS["GZIP"](b"x\n"))
    names = [tmp_path / "missing", tmp_path, tmp_path / "packed", tmp_path / "good"]
    found = collect(rd.TextLineDataset(names).as_numpy_iterator())
    assert [item[0] for item in found[:3]] == ["NotFoundError", "InvalidArgumentError", "DataLossError"]
    assert "try compression_type='GZIP'" in found[2][1]
    assert found[3:] == [b"x"]
    check_op(lambda: rd.TextLineDataset(names))


def test_the_wrong_compression_is_said(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"text\n")
    with pytest.raises(rd.DataLossError, match="Was the file written with compression_type='GZIP'"):
        next(iter(rd.TextLineDataset(tmp_path / "x", "GZIP")))


def test_truncated_and_corrupt_compressed_files(tmp_path: Path) -> None:
    packed = COMPRESS["GZIP"](b"".join(b"line %d\n" % i for i in range(100)))
    for damaged in (packed[:-20], packed[:-8] + bytes(8)):
        (tmp_path / "x").write_bytes(damaged)
        found = collect(rd.TextLineDataset(tmp_path / "x", "GZIP").as_numpy_iterator())
        assert found[-1][0] == "DataLossError"
        assert found[:-1] == [b"line %d" % i for i in range(len(found) - 1)]
