"""Which step functions the replicas have: each is sent once, and again when it has changed."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any, final

from raydist.mirroring.discovery import Discovery
from raydist.mirroring.shipment import Shipment

__all__ = ["StepFunctions"]

_KEPT = 64


@final
class StepFunctions:
    """The driver's side of `SentFunctions`."""

    def __init__(self) -> None:
        self._sent: OrderedDict[bytes, None] = OrderedDict()  # the one that has been unused for longest first

    def pickle(self, discovery: Discovery, fn: Any) -> tuple[bytes, bytes]:
        """The function, empty where the replicas have it, and its digest."""
        function = discovery.pickle_function(fn)
        if discovery.per_replica:  # a function that holds PerReplica values is another one in every step
            return function, b""
        digest = hashlib.blake2b(function, digest_size=16).digest()
        return b"" if digest in self._sent else function, digest

    def too_many(self, digest: bytes) -> tuple[bytes, ...]:
        """The function that has been unused for longest, if another one needs its place."""
        full = digest and digest not in self._sent and len(self._sent) >= _KEPT
        return (next(iter(self._sent)),) if full else ()

    def mark_sent(self, shipment: Shipment) -> None:
        """A shipment is on its way."""
        if shipment.digest:
            self._sent[shipment.digest] = None
            self._sent.move_to_end(shipment.digest)
        for digest in shipment.forget:
            del self._sent[digest]

    def forget(self) -> None:
        """The replicas have none any more."""
        self._sent.clear()
