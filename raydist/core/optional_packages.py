"""Packages that only some functions need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from raydist.core.errors import FailedPreconditionError


def optional_module(module: str, user: str, to_install: str) -> Any:
    """Return the module `module` for `user`, a name in the plural; `to_install` are arguments of pip.

    Raises:
        FailedPreconditionError: It cannot be imported.

    >>> optional_module("json", "Settings", "json").loads("3")
    3
    """
    try:
        return import_module(module)  # 0.5 us once it is there; `sys.modules` shows it half made to other threads
    except ImportError as error:
        raise FailedPreconditionError(
            f"{user} need the package {module.partition('.')[0]}, which cannot be imported ({error}). Run: pip install "
            f"{to_install}"
        ) from error
