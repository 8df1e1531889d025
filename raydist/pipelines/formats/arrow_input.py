"""Files as inputs of pyarrow's readers, which read in their own threads.

Such a thread releases a file shortly after the reader has returned. If it needs the interpreter's lock for that while
the interpreter exits, the process aborts ("terminate called without an active exception").
"""

from __future__ import annotations

import atexit
import io
import time
import weakref
from typing import Any, final

from raydist.pipelines.formats.files import ReadableFile

__all__ = ["as_arrow_file"]

_AT_EXIT_S = 1.0
_LOOK_S = 1e-3


@final
class _Lent:
    """A Python file that Arrow's threads use. The caller keeps the file itself."""

    def __init__(self, file: Any) -> None:
        self._file = file
        _lent.add(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


_lent: weakref.WeakSet[_Lent] = weakref.WeakSet()


def as_arrow_file(file: ReadableFile) -> Any:
    """Return the file as an input of pyarrow's readers, which must be closed in addition to `file`.

    Arrow opens a local file again (14 us) and reads it without Python. For other files, the exit of the process waits
    until Arrow's threads have released those that are closed.
    """
    import pyarrow  # needed only for its readers

    if isinstance(file, pyarrow.NativeFile):
        return file
    if isinstance(file, io.FileIO):
        try:
            return pyarrow.OSFile(f"/dev/fd/{file.fileno()}")
        except OSError:  # a container without /proc, or a process that changed to a user without permission
            pass
    return pyarrow.PythonFile(_Lent(file), mode="r")


@atexit.register
def _await_arrow() -> None:
    """Wait until Arrow's threads have released closed files. They do not release files that are still open."""
    deadline = time.monotonic() + _AT_EXIT_S
    while any(one.closed for one in tuple(_lent)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
