"""What a parameter server has done, for Ray's dashboard and whatever scrapes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from ray.util.metrics import Counter, Gauge

from raydist.parameter_servers.server_stats import ServerStats

__all__ = ["ServerMetrics", "staleness_bucket"]

_TAGS = ("strategy", "server")
_COUNTED = {
    "pulls": "Reads of values.",
    "pushes": "Changes applied.",
    "late": "Gradients dropped because they came after their step.",
    "bytes_pulled": "Bytes of values read.",
    "bytes_pushed": "Bytes of changes.",
    "apply_seconds": "Seconds spent in applying changes.",
}


@final
class ServerMetrics:
    """Of one server, in its process. Names begin with `raydist_parameter_server_`.

    Args:
        strategy: Name of the strategy, a tag.
        server: The server, a tag.
    """

    def __init__(self, strategy: str, server: str) -> None:
        self._tags = {"strategy": strategy, "server": server}
        self._before = ServerStats(0)
        self._counters: dict[str, Any] = {
            name: Counter(f"raydist_parameter_server_{name}", description=text, tag_keys=_TAGS)
            for name, text in _COUNTED.items()
        }
        self._held = Gauge(
            "raydist_parameter_server_bytes_held",
            description="Bytes of values, and of what optimizers remember.",
            tag_keys=_TAGS,
        )
        self._staleness = Counter(
            "raydist_parameter_server_staleness",
            description="Gradients applied, by how many changes came between their read and that.",
            tag_keys=(*_TAGS, "changes"),
        )

    def update(self, stats: ServerStats) -> None:
        """The server's counts are these now."""
        for name, counter in self._counters.items():
            _raise(counter, getattr(stats, name) - getattr(self._before, name), self._tags)
        self._held.set(stats.bytes_held, tags=self._tags)
        for changes, count in stats.staleness.items():
            tags = {**self._tags, "changes": staleness_bucket(changes)}
            _raise(self._staleness, count - self._before.staleness.get(changes, 0), tags)
        self._before = stats


def _raise(counter: Any, by: float, tags: Mapping[str, str]) -> None:
    if by > 0:  # Ray refuses 0
        counter.inc(by, tags=dict(tags))


def staleness_bucket(changes: int) -> str:
    """The name of the range that a staleness is in: each is twice as wide as the one before.

    >>> [staleness_bucket(changes) for changes in (0, 1, 2, 3, 4, 7, 8)]
    ['0', '1', '2-3', '2-3', '4-7', '4-7', '8-15']
    """
    if changes < 2:
        return str(max(changes, 0))
    first = 1 << (changes.bit_length() - 1)
    return f"{first}-{2 * first - 1}"
