"""Files as pyarrow's readers take them, which read in threads of their own.

Such a thread lets go of a file a moment after the reader has answered. Where that takes the interpreter's lock while
the interpreter ends, the process aborts ("terminate called without an active exception").
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
    """A Python file in the hands of Arrow's threads. Who made it keeps the file itself."""

    def __init__(self, file: Any) -> None:
        self._file = file
        _lent.add(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


_lent: weakref.WeakSet[_Lent] = weakref.WeakSet()


def as_arrow_file(file: ReadableFile) -> Any:
    """The file as pyarrow's readers take it: to be closed beside `file`.

    Arrow opens a local file once more (14 us) and reads it without Python. Of others, those that are closed are
    awaited at the process's end until Arrow's threads have let go of them.
    """
    import pyarrow  # only its readers need it

    if isinstance(file, pyarrow.NativeFile):
        return file
    if isinstance(file, io.FileIO):
        try:
            return pyarrow.OSFile(f"/dev/fd/{file.fileno()}")
        except OSError:  # a container without /proc, or a process that gave up the user who may open it
            pass
    return pyarrow.PythonFile(_Lent(file), mode="r")


@atexit.register
def _await_arrow() -> None:
    """What is still open, its user holds: no thread of Arrow is about to let go of it."""
    deadline = time.monotonic() + _AT_EXIT_S
    while any(one.closed for one in tuple(_lent)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
