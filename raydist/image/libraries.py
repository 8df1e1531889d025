"""The codecs, which are an extra: imported when they are first needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from raydist.errors import FailedPreconditionError

__all__ = ["codec"]


def codec(module: str) -> Any:
    """The module `module` of the extra `images`.

    Raises:
        FailedPreconditionError: It is not installed.
    """
    try:
        return import_module(module)  # 0.5 us once it is there; `sys.modules` shows it half made to other threads
    except ImportError as error:
        raise FailedPreconditionError(
            f"Decoding and resizing images needs {module.partition('.')[0]}, which cannot be imported ({error}). "
            "Run: pip install 'raydist[images]'"
        ) from error
