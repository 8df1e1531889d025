"""The headers of consecutive steps, as they travel: what repeats itself is said once. Pure.

Steps of one loop differ by their number alone. Among 64 replicas on two cores all wait while each reads its message:
so it holds one header for all of these.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Sequence
from dataclasses import fields

from raydist.replicas.step import StepHeader

__all__ = ["pack_headers", "unpack_headers"]

_NAMES = tuple(column.name for column in fields(StepHeader))
_SAID = operator.attrgetter(*(name for name in _NAMES if name not in ("step", "shipment")))
_BEHIND_STEP = operator.attrgetter(*_NAMES[1:])


def pack_headers(headers: Sequence[StepHeader]) -> bytes:
    """The bytes of some headers, in order.

    >>> from raydist.mirroring.shipment import Shipment
    >>> packed = pack_headers([StepHeader(step, 0, Shipment(digest=b"f")) for step in (4, 5, 6)])
    >>> [header.step for header in unpack_headers(packed)]
    [4, 5, 6]
    """
    runs: list[tuple[StepHeader, int]] = []
    for header in headers:
        first, length = runs[-1] if runs else (None, 0)
        if first is not None and header.step == first.step + length and _say_the_same(first, header):
            runs[-1] = first, length + 1
        else:
            runs.append((header, 1))
    return pickle.dumps(runs, pickle.HIGHEST_PROTOCOL)


def unpack_headers(data: bytes) -> list[StepHeader]:
    """The headers of which these are the bytes."""
    headers = []
    for first, length in pickle.loads(data):
        headers.append(first)
        if length > 1:
            rest = _BEHIND_STEP(first)
            headers += [StepHeader(first.step + place, *rest) for place in range(1, length)]
    return headers


def _say_the_same(one: StepHeader, other: StepHeader) -> bool:
    return bool(_SAID(one) == _SAID(other) and one.shipment.travelling == other.shipment.travelling)
