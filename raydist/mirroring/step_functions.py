"""The step functions that the replicas have: each is sent once, and again after a change."""

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
        self._sent: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def pickle(self, discovery: Discovery, fn: Any) -> tuple[bytes, bytes]:
        """Return the pickled function (empty if the replicas have it) and the digest of the pickle."""
        function = discovery.pickle_function(fn)
        if discovery.per_replica:  # a function that holds PerReplica values differs in every step
            return function, b""
        digest = hashlib.blake2b(function, digest_size=16).digest()
        return b"" if digest in self._sent else function, digest

    def too_many(self, digest: bytes) -> tuple[bytes, ...]:
        """Return the digest of the least recently used function if the cache is full and `digest` is new."""
        full = digest and digest not in self._sent and len(self._sent) >= _KEPT
        return (next(iter(self._sent)),) if full else ()

    def mark_sent(self, shipment: Shipment) -> None:
        """Record that a shipment was sent."""
        if shipment.digest:
            self._sent[shipment.digest] = None
            self._sent.move_to_end(shipment.digest)
        for digest in shipment.forget:
            del self._sent[digest]

    def forget(self) -> None:
        """Drop all records: the replicas have lost their functions."""
        self._sent.clear()
