"""Files on this machine, behind URIs, and of web servers that fail now and then."""

from __future__ import annotations

import errno
import io
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import aiohttp
import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import raydist as rd
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, SpecError
from raydist.pipelines.formats import remote_file
from raydist.pipelines.formats.files import create_file, file_errors, open_file, path_text
from raydist.pipelines.formats.remote_file import RemoteFile, is_transient
from tests.contracts.op import collect, iterate, same
from tests.pipelines.formats.record_files import COMPRESS, framed
from tests.pipelines.http_files import serve_files


def test_files_are_opened_by_path_or_uri(tmp_path: Path) -> None:
    path = tmp_path / "with space ü.bin"
    path.write_bytes(b"abc")
    for name in (str(path), f"file://{path}"):
        opened = open_file(name)
        assert opened.size == 3
        assert opened.file.read(10) == b"abc"
        opened.file.close()
    with create_file("memory://folder/data.bin") as file:
        file.write(b"12345")
    opened = open_file("memory://folder/data.bin")
    assert (opened.size, opened.file.read(10)) == (5, b"12345")
    first, second = (open_file("memory://folder/data.bin").file for _ in range(2))  # each has a position of its own
    assert (first.read(2), second.read(3), first.read(3)) == (b"12", b"123", b"345")
    fsspec.filesystem("memory").rm("/folder", recursive=True)
    # fsspec does not know "mock": pyarrow.fs opens it, and finds it empty.
    for missing in ("missing.bin", "file:///nowhere/x", "memory://nowhere/x", "mock:///x"):
        with pytest.raises(NotFoundError, match="must exist, got .*Check the path"):
            open_file(missing)
    with pytest.raises(InvalidArgumentError, match="must be one that fsspec or pyarrow.fs knows, got 'nope://x'"):
        open_file("nope://x")
    wrong: list[Any] = [3, 2.5, None, ["a"]]
    for name in wrong:
        with pytest.raises(SpecError, match="A file name must be a str"):
            path_text(name)


def test_directory_fifo_and_device_are_not_files(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    descriptors = len(os.listdir("/proc/self/fd"))
    for path, kind in ((tmp_path, "a directory"), (fifo, "a FIFO"), (Path("/dev/null"), "a character device")):
        for access in (open_file, create_file):
            with pytest.raises(InvalidArgumentError, match=f"must name a plain file, but {str(path)!r} is {kind}"):
                access(str(path))
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_what_a_system_says_becomes_an_error_of_ours_or_gets_the_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="levels of symbolic links") as caught:
        open_file(str(loop))
    assert caught.value.__notes__ == [f"while accessing {str(loop)!r}"]
    with pytest.raises(NotFoundError, match=r"must exist, got 'x.bin'"), file_errors("x.bin"):
        raise FileNotFoundError
    with pytest.raises(InvalidArgumentError, match="'x.bin' is a directory"), file_errors("x.bin"):
        raise IsADirectoryError
    with pytest.raises(ValueError, match="odd") as other, file_errors("x.bin", 7):
        raise ValueError("odd")
    assert other.value.__notes__ == ["while accessing 'x.bin' at byte 7"]

    def denied(*args: object) -> int:
        raise PermissionError(13, "Permission denied", "x")

    monkeypatch.setattr(os, "open", denied)  # the tests may run as root, who may read everything
    with pytest.raises(FailedPreconditionError, match="permission is denied for 'secret'.*Change its mode"):
        open_file("secret")


@pytest.mark.parametrize("read", [rd.TextLineDataset, rd.Dataset.from_csv])
def test_an_epoch_goes_on_in_the_same_file_only(read: Callable[[str], rd.Dataset], tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("".join(f"{number}\n" for number in range(100, 120)))
    view = rd.OneDeviceStrategy("cpu").distribute_dataset(read(str(path)).batch(4))
    iterator = iter(view)
    next(iterator)
    state: Any = view.state_dict()
    rest = [str(batch) for batch in iterator]

    def resumed() -> list[str]:
        again = rd.OneDeviceStrategy("cpu").distribute_dataset(read(str(path)).batch(4))
        again.load_state_dict(state)
        return [str(batch) for batch in again]

    assert resumed() == rest
    path.write_text("".join(f"{number}\n" for number in range(1000, 1020)))
    with pytest.raises(FailedPreconditionError, match="data.csv' had 80 bytes then and has 100 now"):
        resumed()


CONTENT = bytes(range(100))


@final
class Shaky(io.BytesIO):
    """A file whose reads fail when `fails` says so."""

    def __init__(
        self, fails: Callable[[], BaseException | None], content: bytes = CONTENT, *, streams: bool = False
    ) -> None:
        super().__init__(content)
        self.size = None if streams else len(content)
        self._fails = fails
        self._streams = streams

    def read(self, size: int | None = -1, /) -> bytes:
        if (error := self._fails()) is not None:
            raise error
        return super().read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if self._streams and offset != self.tell():
            raise ValueError("cannot seek")
        return super().seek(offset, whence)


@pytest.fixture(autouse=True)
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(remote_file.with_retries, "__kwdefaults__", {"sleep": found.append})
    return found


def now_and_then(error: BaseException) -> Callable[[], BaseException | None]:
    turns: Iterator[BaseException | None] = iter([error, None, None] * 1000)
    return lambda: next(turns)


def http_error(status: int) -> aiohttp.ClientResponseError:
    return aiohttp.ClientResponseError(None, (), status=status)  # type: ignore[arg-type]  # the request is not looked at


def test_what_may_be_over_in_a_moment() -> None:
    transient = [TimeoutError(), ConnectionResetError(), OSError(errno.EIO, "x"), aiohttp.ServerDisconnectedError()]
    for error in (*transient, aiohttp.ClientPayloadError("cut off"), http_error(503), http_error(429)):
        assert is_transient(error), error
    lasting = [FileNotFoundError(errno.ENOENT, "x"), PermissionError(errno.EACCES, "x"), ValueError("x")]
    for other in (*lasting, http_error(403), KeyboardInterrupt()):
        assert not is_transient(other), other


def test_reading_goes_on_at_the_same_byte() -> None:
    for streams in (False, True):
        fails = now_and_then(ConnectionResetError())
        file = RemoteFile(lambda fails=fails, streams=streams: Shaky(fails, streams=streams))  # type: ignore[misc]
        found = b"".join(iter(lambda file=file: file.read(7), b""))  # type: ignore[misc]
        assert found == CONTENT
        assert file.seek(50) == 50
        assert file.read(3) == CONTENT[50:53]
        assert file.seek(-3, io.SEEK_CUR) == file.tell() == 50
        assert file.read(3) == CONTENT[50:53]
        if streams:
            with pytest.raises(io.UnsupportedOperation, match="does not tell the size"):
                file.seek(0, io.SEEK_END)
        else:
            assert (file.size_bytes, file.seek(-2, io.SEEK_END), file.read(5)) == (100, 98, CONTENT[98:])
        file.close()
        file.close()
        assert file.closed


def test_a_stream_begins_anew_where_it_is_to_go_back() -> None:
    file = RemoteFile(lambda: Shaky(lambda: None, streams=True))
    assert file.read(60) == CONTENT[:60]
    file.seek(10)
    assert file.read(3) == CONTENT[10:13]
    file.close()


def test_a_file_that_changed_between_two_attempts() -> None:
    contents = iter([CONTENT, CONTENT + b"more"])
    fails = now_and_then(ConnectionResetError())
    file = RemoteFile(lambda: Shaky(fails, next(contents)))
    with pytest.raises(OSError, match="changed while it was read: from 100 to 104 bytes"):
        file.read(5)
    file.close()


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


def test_errors_that_are_no_moment(naps: list[float]) -> None:
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
        assert all(0.1 * 2**i <= nap <= 0.2 * 2**i for i, nap in enumerate(naps[-5:])), "waits grow"
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
