"""Connections of torch's store, passed on so that both of its ends see loopback alone.

For its log torch asks the name service what each address that it connects to or accepts is called, even where nothing
is logged. On the server that happens in the one thread that answers everybody: where a packet of the name service gets
lost, or there is none, all members wait for 5 s and more (measured: 5.1 s for each new generation of a group of four,
now 0.05 s). What loopback is called stands in a file of each machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import final

from raydist.owning_process import OwningProcess

__all__ = ["LOOPBACK", "StoreRelay", "needs_relay"]

LOOPBACK = "127.0.0.1"
_KNOWN = (LOOPBACK, "::1", "localhost")
_MOST_BYTES = 1 << 16
_START_S = 30.0
_CLOSE_S = 5.0
_PAUSE_S = 0.1


def needs_relay(host: str) -> bool:
    """Whether the name service would be asked about an address.

    >>> needs_relay("10.0.0.7"), needs_relay("127.0.0.1")
    (True, False)
    """
    return host not in _KNOWN


@final
class StoreRelay:
    """Passes connections on to another address, byte by byte and both ways, in a thread of its own.

    Args:
        listener: Accepts them; it belongs to this object from now on.
        target: Host and port that they are passed on to.
        only_s: Pass on one connection, which must come within so many seconds, and end with it; None: any number, until
            `close`.

    Attributes:
        port: Of the listener.

    >>> target = socket.create_server((LOOPBACK, 0))
    >>> relay = StoreRelay(socket.create_server((LOOPBACK, 0)), target.getsockname()).start()
    >>> with target, socket.create_connection((LOOPBACK, relay.port)) as connection:
    ...     connection.sendall(b"hello")
    ...     with target.accept()[0] as passed_on:
    ...         passed_on.recv(5)
    b'hello'
    >>> relay.close()
    """

    def __init__(self, listener: socket.socket, target: tuple[str, int], *, only_s: float | None = None) -> None:
        self.port = int(listener.getsockname()[1])
        self._listener = listener
        self._target = target
        self._only_s = only_s
        self._process = OwningProcess("A relay of connections")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raydist-store-relay", daemon=True)

    def start(self) -> StoreRelay:
        """Begin; connections may come at once. Blocking: a moment."""
        self._thread.start()
        self._running.wait(_START_S)
        return self

    def close(self) -> None:
        """Accept no more, and end all connections. Blocking: mostly some ms, at most 5 s. May be called twice."""
        loop, ended = self._loop, self._ended
        if not self._process.is_this or loop is None or ended is None:
            return  # a forked child has no such thread
        with contextlib.suppress(RuntimeError):  # it is over already
            loop.call_soon_threadsafe(ended.set)
        if threading.current_thread() is not self._thread:  # which may collect the garbage that the owner has become
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._running.set()
            self._listener.close()

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._listener.setblocking(False)
        self._running.set()
        if self._only_s is None:
            accepting = asyncio.create_task(self._accept_all())
            await self._ended.wait()
            accepting.cancel()  # with the loop all that are left are
        else:
            with contextlib.suppress(TimeoutError):
                connection = await asyncio.wait_for(self._accept(), self._only_s)
                self._listener.close()  # whoever else knocks is refused
                await self._pass_on(connection)

    async def _accept(self) -> socket.socket:
        connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        return connection

    async def _accept_all(self) -> None:
        tasks: set[asyncio.Task[None]] = set()  # the loop itself holds them weakly
        while True:
            try:
                connection = await self._accept()
            except OSError:  # no descriptor is left, say: whoever knocks waits meanwhile
                await asyncio.sleep(_PAUSE_S)
                continue
            task = asyncio.create_task(self._pass_on(connection))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _pass_on(self, connection: socket.socket) -> None:
        here, reply = await asyncio.open_connection(sock=connection)
        with contextlib.closing(reply), contextlib.suppress(OSError):
            there, request = await asyncio.open_connection(*self._target)
            with contextlib.closing(request):
                ways = [asyncio.create_task(_copy(here, request)), asyncio.create_task(_copy(there, reply))]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one of the two ends."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_MOST_BYTES):
            writer.write(data)
            await writer.drain()
