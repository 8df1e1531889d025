"""Per-replica states of a metric. A sum of floats depends on its order, which a resumed run must reproduce."""

from __future__ import annotations

from typing import Any

__all__ = ["GIVEN_SHARES", "OWNER", "metric_shares"]

OWNER = "_raydist_owner"
"""Class attribute of a mirrored object with the strategy that mirrors it and knows the per-replica states."""

GIVEN_SHARES = "_raydist_shares"
"""Attribute of a metric with the per-replica states that a checkpoint contained, in rank order."""


def metric_shares(metric: Any) -> list[dict[str, Any]]:
    """Return the metric's state on each of several replicas, in rank order; [] if not mirrored or changed here.

    >>> metric_shares(rd.Mean())
    []
    """
    owner = vars(type(metric)).get(OWNER)
    shares: list[dict[str, Any]] = [] if owner is None else owner.metric_shares(metric)
    return shares if len(shares) > 1 else []
