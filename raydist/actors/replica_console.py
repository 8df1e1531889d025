"""Console of a replica's process: log records prefixed with the rank, and debugger support."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
from typing import Any, NoReturn

from raydist.errors import FailedPreconditionError

__all__ = ["console_settings", "open_console"]

_LOG_LEVEL = "RAYDIST_LOG_LEVEL"
_DEBUGGER = "RAY_DEBUG"  # "legacy" is `ray debug`, which needs no further package


def console_settings() -> dict[str, str]:
    """Return the environment variables that give replicas the driver's log level and debugger setting."""
    settings = {_LOG_LEVEL: str(logging.getLogger().level)}
    if _DEBUGGER in os.environ:
        settings[_DEBUGGER] = os.environ[_DEBUGGER]
    return settings


def open_console(title: str) -> None:
    """Log to stderr from the driver's level on, and make `breakpoint()` either work or raise an error that helps.

    Args:
        title: Title of this actor, for example "replica 1 of mirrored-1a2b3c4d".
    """
    short = title.partition(" of ")[0]
    root = logging.getLogger()
    root.setLevel(int(os.environ.get(_LOG_LEVEL, logging.WARNING)))
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)  # Ray forwards stderr to the driver
        handler.setFormatter(logging.Formatter(f"[{short}] %(levelname)s:%(name)s:%(message)s"))
        root.addHandler(handler)
    if os.environ.get(_DEBUGGER) != "legacy" and importlib.util.find_spec("debugpy") is None:
        sys.breakpointhook = functools.partial(_refuse_breakpoint, short)  # Ray's hook only logs a line


def _refuse_breakpoint(title: str, *_: Any, **__: Any) -> NoReturn:
    raise FailedPreconditionError(
        f"breakpoint() needs a terminal, and {title} has none. Run the program with rd.OneDeviceStrategy, where "
        "breakpoint() is pdb as usual; or set RAY_DEBUG=legacy before the program starts and call `ray debug` in "
        "another terminal; or install debugpy, for Ray's distributed debugger."
    )
