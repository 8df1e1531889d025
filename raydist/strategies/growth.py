"""More replicas for an elastic strategy, once the cluster has room for them again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import final

from raydist.cluster.nodes import PlaceRequest
from raydist.cluster.reservation import Reservation
from raydist.options import Elastic


@final
class Growth:
    """The requests of one elastic strategy for room. Does not block.

    Args:
        options: The limits.
        num_replicas: Number of replicas at the start.
        unit: Number of replicas in a bundle.
        request: Requests a bundle.
        clock: Returns seconds.
    """

    def __init__(
        self,
        options: Elastic,
        num_replicas: int,
        unit: int,
        *,
        request: Callable[[Mapping[str, float]], PlaceRequest],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grow_after_s = options.grow_after_s
        self._most = options.max_replicas or num_replicas
        self._unit = unit
        self._request = request
        self._clock = clock
        self._changed_at = clock()
        self._requests: list[PlaceRequest] = []

    def is_due(self, num_replicas: int) -> bool:
        """Return True if it is time to look for room."""
        return num_replicas + self._unit <= self._most and self._clock() >= self._changed_at + self._grow_after_s

    def look(self, num_replicas: int, num_ready: int, num_idle: int, bundle: Callable[[], Mapping[str, float]]) -> int:
        """Return the number of replicas that have room now; request room for those that have none.

        Args:
            num_replicas: Present number.
            num_ready: Number of reserved places that no replica uses.
            num_idle: The same, with those for which Ray looks for another node.
            bundle: Returns the resources of a bundle.
        """
        wanted = (self._most - num_replicas) // self._unit
        missing = max(0, wanted - num_idle // self._unit)
        while len(self._requests) < missing:
            self._requests.append(self._request(bundle()))
        ready = num_ready // self._unit + sum(each.is_placed for each in self._requests)
        return num_replicas + min(wanted, ready) * self._unit

    def take(self, num_bundles: int) -> list[Reservation]:
        """Return this many reservations that were placed, for the caller."""
        placed = [each for each in self._requests if each.is_placed][:num_bundles]
        self._requests = [each for each in self._requests if each not in placed]
        return [each.take() for each in placed]

    def note_change(self) -> None:
        """Record that the number of replicas has changed: withdraw requests, and wait before the next ones."""
        self._changed_at = self._clock()
        self.close()

    def close(self) -> None:
        """Withdraw all requests."""
        for each in self._requests:
            each.cancel()
        self._requests.clear()
