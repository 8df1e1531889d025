"""A web server for files in memory, which can be told to fail."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, final

__all__ = ["FileServer", "serve_files"]

Failure = Literal["drop", "short"] | int
"""Close the connection, send half of the body, or answer with a status."""


@final
class FileServer:
    """Files by name, and how the next requests for their contents fail.

    Attributes:
        files: Contents by name; may be changed at any time.
        failures: One for each coming request for content, first to last.
        requests: Requests for content so far.
        ranges: Whether the server understands requests for a range of bytes, and tells sizes.
    """

    def __init__(self, *, ranges: bool) -> None:
        self.files: dict[str, bytes] = {}
        self.failures: deque[Failure] = deque()
        self.requests = 0
        self.ranges = ranges
        self.address = ""

    def url(self, name: str) -> str:
        """Where a file is."""
        return f"{self.address}/{name}"


@final
class _Server(ThreadingHTTPServer):
    daemon_threads = False
    files: FileServer


@final
class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5.0
    server: _Server

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""

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
        wanted = self.headers.get("Range", "")
        ranges = self.server.files.ranges
        if not ranges or not wanted.startswith("bytes="):
            return 200, content, {"Accept-Ranges": "bytes" if ranges else "none"}
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(content)) + 1, len(content))
        return 206, content[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], *, send_body: bool = True, short: bool = False
    ) -> None:
        self.send_response(status)
        chunked = status == 200 and not self.server.files.ranges
        lengths = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(len(body))}
        # A connection that is kept for the next request would keep its thread.
        for name, value in {**headers, **lengths, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
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
    server.files.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="file-server")
    thread.start()
    try:
        yield server.files
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
