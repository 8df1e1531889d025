from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterator
from typing import final

import aiohttp
import fsspec
import pytest

from raydist.pipelines.formats import remote_file
from raydist.pipelines.formats.remote_file import ATTEMPTS, RemoteFile, is_transient, open_remote, with_retries

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


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (OSError(errno.EIO, "x"), True),
        (aiohttp.ServerDisconnectedError(), True),
        (aiohttp.ClientPayloadError("cut off"), True),
        (aiohttp.ClientResponseError(None, (), status=503), True),  # type: ignore[arg-type]  # the request is not looked at
        (aiohttp.ClientResponseError(None, (), status=429), True),  # type: ignore[arg-type]  # as above
        (aiohttp.ClientResponseError(None, (), status=403), False),  # type: ignore[arg-type]  # as above
        (FileNotFoundError(errno.ENOENT, "x"), False),
        (PermissionError(errno.EACCES, "x"), False),
        (ValueError("x"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_may_be_over_in_a_moment(error: BaseException, transient: bool) -> None:
    assert is_transient(error) is transient


def test_waits_grow_and_end(naps: list[float]) -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise ConnectionError("down")

    with pytest.raises(ConnectionError, match="down") as caught:
        with_retries(fail)
    assert caught.value.__notes__ == [f"The server failed {ATTEMPTS} times in a row."]
    assert len(calls) == ATTEMPTS == len(naps) + 1
    assert all(0.1 * 2**i <= nap <= 0.2 * 2**i for i, nap in enumerate(naps))


def test_other_errors_are_not_tried_again(naps: list[float]) -> None:
    with pytest.raises(ZeroDivisionError):
        with_retries(lambda: 1 / 0)
    assert naps == []


@pytest.mark.parametrize("streams", [False, True])
def test_reading_goes_on_at_the_same_byte(streams: bool) -> None:
    fails = now_and_then(ConnectionResetError())
    file = RemoteFile(lambda: Shaky(fails, streams=streams))
    found = b"".join(iter(lambda: file.read(7), b""))
    assert found == CONTENT
    assert file.seek(50) == 50
    assert file.read(3) == CONTENT[50:53]
    assert file.seek(-3, io.SEEK_CUR) == file.tell() == 50
    assert file.read(3) == CONTENT[50:53]
    file.close()
    file.close()
    assert file.closed


def test_the_end_is_known_where_the_size_is() -> None:
    file = RemoteFile(lambda: Shaky(lambda: None))
    assert (file.size_bytes, file.seek(-2, io.SEEK_END), file.read(5)) == (100, 98, CONTENT[98:])
    file.close()
    stream = RemoteFile(lambda: Shaky(lambda: None, streams=True))
    with pytest.raises(io.UnsupportedOperation, match="does not tell the size"):
        stream.seek(0, io.SEEK_END)
    stream.close()


def test_a_file_that_changed_between_two_attempts() -> None:
    contents = iter([CONTENT, CONTENT + b"more"])
    fails = now_and_then(ConnectionResetError())
    file = RemoteFile(lambda: Shaky(fails, next(contents)))
    with pytest.raises(OSError, match="changed while it was read: from 100 to 104 bytes"):
        file.read(5)
    file.close()


def test_readers_of_a_file_in_memory_have_their_own_positions() -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/positions", CONTENT)
    try:
        first, second = (RemoteFile(lambda: open_remote(system, "/positions")) for _ in range(2))
        assert first.size_bytes == len(CONTENT)
        assert first.read(10) == second.read(10) == CONTENT[:10]
        assert first.read(10) == second.read(10) == CONTENT[10:20]
    finally:
        system.rm("/positions")
