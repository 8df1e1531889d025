"""Cases of a table that one test goes through."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def case(name: object) -> Iterator[None]:
    """Say in an error which case failed."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case: {name}")
        raise
