from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import raydist as rd
from raydist.pipelines.formats import tar_samples
from raydist.pipelines.optimize.file_shards import shard_files
from raydist.pipelines.sources.file_format import TarFormat
from tests.contracts.op import collect, is_error, iterate

LONG = "L" * 150 + "ö/" + "n" * 120


def write_tar(
    path: Path, members: Sequence[tuple[str, bytes | None]], form: int = tarfile.PAX_FORMAT, **pax_headers: str
) -> str:
    """Write members in order; a folder where there are no bytes. `pax_headers` are of the whole file."""
    mode: Any = "w:gz" if path.name.lower().endswith("gz") else "w"
    with tarfile.open(path, mode, format=form, pax_headers=pax_headers) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            info.size = len(data or b"")
            tar.addfile(info, io.BytesIO(data or b""))
    return str(path)


def samples(path: str) -> tuple[list[dict[str, object]], Exception | None]:
    reader = TarFormat().open_records(path, 0, 0)
    records, error = reader.read(1000)
    reader.close()
    return [tar_samples.SampleMembers(None)(record) for record in records], error


def test_grouping_is_that_of_webdataset(tmp_path: Path) -> None:
    members = [
        *(("__meta__", b"{}"), ("d", None), ("d/001.JPG", b"x" * 700), ("d/001.cls", b"1"), ("d/nodot", b"z")),
        *(("./a.seg.png", b""), ("./a.cls", b"q" * 512), (f"{LONG}.txt", b"long"), ("d/.hid", b"h"), ("d.x/a.b", b"7")),
        *(("d.x/noext", b"8"), ("__m__/x.y", b"9")),
    ]
    expected = [
        {"__key__": "d/001", "jpg": b"x" * 700, "cls": b"1"},
        {"__key__": "./a", "seg.png": b"", "cls": b"q" * 512},
        {"__key__": LONG, "txt": b"long"},
        {"__key__": "d/", "hid": b"h"},
        {"__key__": "d.x/a", "b": b"7"},
    ]
    for form, suffix in ((tarfile.PAX_FORMAT, ".tar"), (tarfile.GNU_FORMAT, ".tar.gz"), (tarfile.PAX_FORMAT, ".TGZ")):
        assert samples(write_tar(tmp_path / f"x{suffix}", members, form, comment="as git has it")) == (
            expected,
            None,
        ), suffix


def test_files_that_end_early_or_were_joined(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    write_tar(path, [(f"{number}.x", b"%d" % number * 100) for number in range(3)])
    content = path.read_bytes()
    for cut in (600, 1024, 1500, 3000):
        path.write_bytes(content[:cut])
        found, error = samples(str(path))
        assert isinstance(error, rd.DataLossError)
        assert "must be complete" in str(error)
        assert (error.path, len(found)) == (str(path), max(0, cut // 1024 - 1))
    path.write_bytes(content * 2)
    found, error = samples(str(path))
    assert [sample["__key__"] for sample in found] == ["0", "1"]
    assert "other bytes follow a block of zeros" in str(error)


def test_what_a_header_claims_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    info = tarfile.TarInfo("a.x")
    info.size = 1 << 40
    pax = tarfile.TarInfo("pax")
    pax.type, pax.size = tarfile.XHDTYPE, 1 << 30
    cases = [(info, "may have at most 1073741824 bytes"), (pax, "A name must have at most 65536 bytes, got 1073741824")]
    for header, message in cases:
        path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
        assert message in str(samples(str(path))[1])
    info.size = 1 << 20
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    assert "needs 1048576 bytes and at most 2048 are left" in str(samples(str(path))[1])
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT).replace(b"a.x", b"b.x") + bytes(2048))
    assert "A header of a tar file must be intact, but reading it fails: bad checksum" in str(samples(str(path))[1])


def test_pax_headers_that_make_no_sense(tmp_path: Path) -> None:
    for records in (b"9 path=a\n\n", b"999999999999 path=a\n", b"x", b"11 size=-5\n", b"5 a=b"):
        pax, info = tarfile.TarInfo("pax"), tarfile.TarInfo("a.x")
        pax.type, pax.size = tarfile.XHDTYPE, len(records)
        content = pax.tobuf(tarfile.USTAR_FORMAT) + records.ljust(512, b"\0") + info.tobuf() + bytes(1024)
        (tmp_path / "x.tar").write_bytes(content)
        found, error = samples(str(tmp_path / "x.tar"))
        assert not found, records
        assert isinstance(error, rd.DataLossError), records


def test_a_size_in_a_pax_header_is_the_one_that_counts(tmp_path: Path) -> None:
    pax = tarfile.TarInfo("pax")
    pax.type, pax.size = tarfile.XHDTYPE, 10
    content = pax.tobuf(tarfile.USTAR_FORMAT) + b"10 size=5\n".ljust(512, b"\0") + tarfile.TarInfo("a.x").tobuf()
    (tmp_path / "x.tar").write_bytes(content + b"12345".ljust(512, b"\0") + bytes(1024))
    assert samples(str(tmp_path / "x.tar")) == ([{"__key__": "a", "x": b"12345"}], None)


def test_samples_of_differing_members(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("a.x", b"1"), ("b.x", b"2"), ("b.y", b"3"), ("c.x", b"4")])
    found = collect(iterate(rd.Dataset.from_tar(path)))
    assert [item[0] if is_error(item) else item["x"] for item in found] == [b"1", "SpecError", b"4"]
    dataset = rd.Dataset.from_tar(path, members=["x"])
    assert dataset.element_spec == {"__key__": rd.TensorSpec((), str), "x": rd.TensorSpec((), bytes)}
    assert [row["x"] for row in dataset] == [b"1", b"2", b"4"]
    both = collect(iterate(rd.Dataset.from_tar(path, members=["x", "y"])))
    assert [item[0] if is_error(item) else item["y"] for item in both] == ["SpecError", b"3", "SpecError"]
    assert "A sample must have the members x, y, but 'a' has x" in both[0][1]
    with pytest.raises(rd.InvalidArgumentError, match=r"members must be a list of names .*got 'x'"):
        rd.Dataset.from_tar(path, members="x")
    with pytest.raises(rd.InvalidArgumentError, match="max_sample_bytes must be >= 1"):
        rd.Dataset.from_tar(path, max_sample_bytes=0)
    doubled = write_tar(tmp_path / "y.tar", [("a.x", b"1"), ("b.x", b"2"), ("b.X", b"3"), ("c.x", b"4")])
    found = collect(iterate(rd.Dataset.from_tar(doubled)))
    assert [item[0] if is_error(item) else item["x"] for item in found] == [b"1", "DataLossError", b"4"]
    assert f"'b' has two named 'x' (file {doubled!r}, byte 1024)" in found[1][1]
    apart = write_tar(tmp_path / "z.tar", [("a.x", b"1"), ("b.x", b"2"), ("a.y", b"3"), ("c.x", b"4")])
    found = collect(iterate(rd.Dataset.from_tar(apart)))
    assert [item[0] if is_error(item) else item["x"] for item in found] == [b"1", b"2", "DataLossError", b"4"]
    assert "'a' has some here and some before other samples" in found[2][1]


def test_files_in_turn_and_by_names_of_a_dataset(tmp_path: Path) -> None:
    for number in range(3):
        write_tar(tmp_path / f"{number}.tar", [(f"{number}{sample}.x", b"") for sample in range(2)])
    names = rd.Dataset.list_files(f"{tmp_path}/*.tar", shuffle=False)
    keys = [row["__key__"] for row in rd.Dataset.from_tar(names, num_parallel_reads=2)]
    assert keys == ["00", "10", "01", "11", "20", "21"]
    dataset = rd.Dataset.from_tar([f"{tmp_path}/{number}.tar" for number in range(3)])
    shards = [rd.Dataset(shard_files(dataset._op, 2, worker)) for worker in range(2)]
    assert [[row["__key__"] for row in shard] for shard in shards] == [["00", "01", "20", "21"], ["10", "11"]]
