"""An input worker's view of the buffers that it writes results into."""

from __future__ import annotations

import mmap
import os
import stat
from typing import final

from raydist.actors.workers.shared_buffers import BUFFER_NAME, MOST_BUFFERS, BufferAddress

__all__ = ["MappedBuffers"]

_MOST_MAPPED = 2 * MOST_BUFFERS  # of blocks and results; one that was given up goes when another takes its place


@final
class MappedBuffers:
    """Maps every buffer once; the last ones used are kept."""

    def __init__(self) -> None:
        self._known: dict[bytes, mmap.mmap | None] = {}  # None for one that is not to be had here

    def get(self, address: BufferAddress) -> mmap.mmap | None:
        """The memory of a buffer; None where this process cannot open it, being on another machine, say."""
        token = address.token
        memory = self._known.pop(token) if token in self._known else _mapped(address)
        self._known[token] = memory
        if len(self._known) > _MOST_MAPPED:
            self._known.pop(next(iter(self._known)))
        return memory


def _mapped(address: BufferAddress) -> mmap.mmap | None:
    path = f"/proc/{address.pid}/fd/{address.fd}"
    try:
        # Process ids of another machine or container may mean anything here, a device whose opening does something too.
        if BUFFER_NAME not in os.readlink(path):
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size != address.num_bytes:
            return None
        memory = mmap.mmap(fd, address.num_bytes)
    except OSError:
        return None
    finally:
        os.close(fd)
    return memory if memory[: len(address.token)] == address.token else None
