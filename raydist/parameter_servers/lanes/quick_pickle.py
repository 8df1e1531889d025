"""A faster pickler for requests and answers, which reads the fields of dataclasses directly.

The standard pickle of a frozen dataclass with slots looks its fields up in Python each time: 5 us for each of the
five in a push and its answer.
"""

from __future__ import annotations

import copyreg
import io
import operator
import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, final

from raydist.parameter_servers import requests
from raydist.parameter_servers.lanes.area import AreaAddress, AreaBlock
from raydist.parameter_servers.slices import ServedSlice

__all__ = ["QuickPickler"]


@final
class QuickPickler:
    """A pickler for one lane; `pickle.loads` reads its output."""

    def __init__(self) -> None:
        named = [getattr(requests, name) for name in requests.__all__]
        kinds = [kind for kind in named if isinstance(kind, type) and is_dataclass(kind)]
        self._reducers = _Reducers({kind: _reducer_of(kind) for kind in [*kinds, AreaBlock, AreaAddress, ServedSlice]})

    def dumps(self, value: Any) -> bytes:
        """Return the pickle of a value."""
        written = io.BytesIO()
        pickler = pickle.Pickler(written, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = self._reducers
        pickler.dump(value)
        return written.getvalue()


class _Reducers(dict[type[Any], Callable[[Any], Any]]):
    """Reducers by type that fall back to copyreg's, which a pickler with its own table ignores.

    The fallback is no copy: other packages may register types at any time, and a copy costs each pickle 1 us.
    """

    def __missing__(self, kind: type[Any]) -> Callable[[Any], Any]:
        return copyreg.dispatch_table[kind]  # the pickler catches the KeyError of an unknown type


def _reducer_of(kind: type[Any]) -> Callable[[Any], tuple[Any, tuple[Any, ...]]]:
    names = [field.name for field in fields(kind)]
    if not names:
        return lambda obj: (kind, ())
    get = operator.attrgetter(*names)
    return (lambda obj: (kind, (get(obj),))) if len(names) == 1 else (lambda obj: (kind, get(obj)))
