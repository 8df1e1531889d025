"""Counters of Ray's metrics, which exist once there is something to count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import ray
from ray.util.metrics import Counter

__all__ = ["MetricCounters"]


@final
class MetricCounters:
    """Counters with the same tags, for Ray's dashboard and whatever scrapes it.

    Args:
        described: What each counts, by name.
        tags: The same for all.
    """

    def __init__(self, described: Mapping[str, str], tags: Mapping[str, str]) -> None:
        self._described = dict(described)
        self._tags = dict(tags)
        self._counters: dict[str, Any] = {}

    def raise_by(self, amounts: Mapping[str, float]) -> None:
        """Add to them; what is 0 or less adds nothing. Nothing happens where there is no Ray."""
        if not ray.is_initialized():
            return
        for name, amount in amounts.items():
            if amount > 0:  # Ray refuses 0
                self._counter(name).inc(amount, tags=self._tags)

    def _counter(self, name: str) -> Any:
        if name not in self._counters:
            self._counters[name] = Counter(name, description=self._described[name], tag_keys=tuple(self._tags))
        return self._counters[name]
