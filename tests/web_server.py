"""Web servers of tests: they run until the end of a block, and answer requests for a part of a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["QuietHandler", "WebServer", "running"]


class WebServer(ThreadingHTTPServer):
    """On a free port of this machine, with threads that are waited for when it ends."""

    daemon_threads = False
    request_queue_size = 64

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class QuietHandler(BaseHTTPRequestHandler):
    """Answers with headers that leave no connection open: one kept for the next request would keep its thread."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""

    def part(self, content: bytes) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers for the range of bytes that was asked for; for all where none was."""
        wanted = self.headers.get("Range", "")
        if not wanted.startswith("bytes="):
            return 200, content, {"Accept-Ranges": "bytes"}
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(content)) + 1, len(content))
        return 206, content[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}

    def send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def running(server: WebServer, name: str) -> Iterator[None]:
    """It answers in a thread of this name until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name=name)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
