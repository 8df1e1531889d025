"""A web server for files in memory, which can be told to fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, final

from tests.web_server import QuietHandler, WebServer, running

__all__ = ["FileServer", "serve_files"]

Failure = Literal["drop", "short"] | int
"""Close the connection, send half of the body, or answer with a status."""


@final
class FileServer:
    """Files by name, and how the next requests for their contents fail."""

    def __init__(self, *, ranges: bool) -> None:
        self.files: dict[str, bytes] = {}
        self.failures: deque[Failure] = deque()
        self.requests = 0
        self.ranges = ranges
        self.address = ""

    def url(self, name: str) -> str:
        """The address of a file."""
        return f"{self.address}/{name}"


@final
class _Server(WebServer):
    files: FileServer


@final
class _Handler(QuietHandler):
    timeout = 5.0
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def do_GET(self) -> None:
        self.server.files.requests += 1
        self._answer(send_body=True)

    def _answer(self, *, send_body: bool) -> None:
        files = self.server.files
        content = files.files.get(self.path.lstrip("/"))
        failure = files.failures.popleft() if content is not None and send_body and files.failures else None
        if content is None:
            self._send(404, b"", {})
        elif failure == "drop":
            self.close_connection = True
        elif isinstance(failure, int):
            self._send(failure, b"", {})
        else:
            status, body, headers = self._part(content)
            self._send(status, body, headers, send_body=send_body, short=failure == "short")

    def _part(self, content: bytes) -> tuple[int, bytes, dict[str, str]]:
        return self.part(content) if self.server.files.ranges else (200, content, {"Accept-Ranges": "none"})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], *, send_body: bool = True, short: bool = False
    ) -> None:
        chunked = status == 200 and not self.server.files.ranges
        lengths = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(len(body))}
        self.send_head(status, {**headers, **lengths})
        if send_body:
            sent = body[: len(body) // 2] if short else body
            self.wfile.write(_chunks(sent, ended=not short) if chunked else sent)


def _chunks(body: bytes, *, ended: bool) -> bytes:
    """A body as HTTP sends it where its length is not told."""
    data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    return data + b"0\r\n\r\n" if ended else data


@contextmanager
def serve_files(*, ranges: bool = True) -> Iterator[FileServer]:
    """A server on a free port of this machine, until the end of the block."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.files = FileServer(ranges=ranges)
    server.files.address = f"http://{server.address}"
    with running(server, "file-server"):
        yield server.files
