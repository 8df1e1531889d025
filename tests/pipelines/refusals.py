"""Tables of calls that must be refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

__all__ = ["check_refused"]


def check_refused(kind: type[BaseException], cases: Iterable[tuple[Callable[[], object], str]]) -> None:
    """Call each function: it must raise an error of this kind, whose text matches the pattern."""
    wrong: list[str] = []
    for number, (call, message) in enumerate(cases):
        try:
            got = f"returned {call()!r}"
        except kind as error:
            if re.search(message, str(error)):
                continue
            got = repr(error)
        wrong.append(f"case {number}, which must say {message!r}, {got}")
    assert not wrong, "\n".join(wrong)
