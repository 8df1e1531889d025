"""Every reader of files, on file systems that are not local."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import raydist as rd
from raydist.pipelines.formats import remote_file
from tests.contracts.op import collect, iterate, same
from tests.pipelines.formats.record_files import COMPRESS, framed
from tests.pipelines.http_files import serve_files

TABLE = pa.table({"x": pa.array(range(30), pa.int64()), "s": [f"text {i}" for i in range(30)]})
LINES = b"".join(b"line %d\n" % i for i in range(30))
RECORDS = [b"record %d" % i for i in range(30)]


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(TABLE, sink, row_group_size=7, write_page_checksum=True)
    return sink.getvalue()


def arrow() -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=7)
    return sink.getvalue()


def csv() -> bytes:
    sink = io.BytesIO()
    pa.csv.write_csv(TABLE, sink)
    return sink.getvalue()


READERS: dict[str, tuple[Callable[[], bytes], Callable[[str], rd.Dataset]]] = {
    "tfrecord": (lambda: framed(*RECORDS), rd.TFRecordDataset),
    "tfrecord.gz": (lambda: COMPRESS["GZIP"](framed(*RECORDS)), lambda path: rd.TFRecordDataset(path, "GZIP")),
    "tfrecord.ahead": (lambda: framed(*RECORDS), lambda path: rd.TFRecordDataset([path] * 3, num_parallel_reads=2)),
    "text": (lambda: LINES, rd.TextLineDataset),
    "fixed": (lambda: bytes(range(90)), lambda path: rd.FixedLengthRecordDataset(path, 3)),
    "parquet": (parquet, rd.Dataset.from_parquet),
    "arrow": (arrow, rd.Dataset.from_arrow),
    "csv": (csv, rd.Dataset.from_csv),
    "json": (lambda: b"".join(b'{"x": %d}\n' % i for i in range(30)), rd.Dataset.from_json),
}


@pytest.fixture(autouse=True)
def no_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file.with_retries, "__kwdefaults__", {"sleep": lambda seconds: None})


def elements(name: str, path: str) -> list[Any]:
    found: list[Any] = collect(iterate(READERS[name][1](path)))
    return found


@pytest.mark.parametrize("ranges", [True, False])
def test_on_a_web_server(ranges: bool, tmp_path: Any) -> None:
    with serve_files(ranges=ranges) as server:
        for name, (make, read) in READERS.items():
            if not ranges and name in ("parquet", "arrow"):
                continue  # they begin with their last bytes
            (tmp_path / "x").write_bytes(make())
            server.files[name] = make()
            expected = elements(name, str(tmp_path / "x"))
            assert same(elements(name, server.url(name)), expected), name
            first = iterate(read(server.url(name)))
            assert same(collect(first, 8), expected[:8]), name
            resumed = iterate(read(server.url(name)))
            resumed.load_state_dict(first.state_dict())
            assert same(collect(resumed), expected[8:]), name
            first.close()


def test_a_server_that_fails_for_a_moment(tmp_path: Any) -> None:
    with serve_files(ranges=True) as server:
        for name in ("tfrecord", "parquet"):
            make, read = READERS[name]
            (tmp_path / "x").write_bytes(make())
            server.files[name] = make()
            expected = elements(name, str(tmp_path / "x"))
            failures: list[Any] = [503, 429, "drop", "short"]
            for failure in failures:
                dataset = read(server.url(name))
                server.failures.extend([failure] * 3)
                assert same(collect(iterate(dataset)), expected), (name, failure)
                assert not server.failures


def test_errors_that_are_no_moment() -> None:
    with serve_files(ranges=True) as server:
        server.files["x"] = framed(*RECORDS)
        with pytest.raises(rd.NotFoundError, match="must exist, got 'http.*missing'"):
            next(iterate(rd.TFRecordDataset(server.url("missing"))))
        for status in (401, 403):
            server.failures.append(status)
            with pytest.raises(rd.FailedPreconditionError, match="permission is denied for 'http"):
                next(iterate(rd.TFRecordDataset(server.url("x"))))
        server.failures.append(418)
        with pytest.raises(rd.FailedPreconditionError, match="answered with HTTP status 418") as caught:
            next(iterate(rd.TFRecordDataset(server.url("x"))))
        assert f"while accessing {server.url('x')!r}" in caught.value.__notes__[0]
        before = server.requests
        server.failures.extend([503] * 1000)
        with pytest.raises(rd.FailedPreconditionError, match="must hand out 'http.*status 503") as caught:
            next(iterate(rd.TFRecordDataset(server.url("x"))))
        assert "The server failed 6 times in a row." in caught.value.__notes__
        assert server.requests - before < 20


def test_a_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts, and says nothing."""
    monkeypatch.setattr(remote_file, "_SILENCE_S", 0.2)
    monkeypatch.setattr(remote_file, "ATTEMPTS", 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x"
        for make in (rd.TFRecordDataset, rd.Dataset.from_parquet, rd.Dataset.from_json):
            with pytest.raises(rd.FailedPreconditionError, match=f"must hand out '{url}', but it did not answer"):
                next(iterate(make(url)))
    with pytest.raises(rd.FailedPreconditionError, match="did not answer"):  # nobody listens there any more
        rd.Dataset.from_json(url)


def test_numpy_files_are_local(tmp_path: Any) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    assert [int(x) for x in rd.Dataset.from_numpy(f"file://{tmp_path}/x.npy").as_numpy_iterator()] == [0, 1, 2]
    assert len(rd.Dataset.from_numpy(f"file://localhost{tmp_path}/x.npy")) == 3
    with pytest.raises(rd.InvalidArgumentError, match="must be of this machine .* names the host 'other'"):
        rd.Dataset.from_numpy("file://other/x.npy")
    with pytest.raises(rd.InvalidArgumentError, match="needs a local path, got 'memory://x.npy'"):
        rd.Dataset.from_numpy("memory://x.npy")
