"""What each replica holds of a metric: a sum of floats depends on its order, and a resumed run has the same."""

from __future__ import annotations

from typing import Any

__all__ = ["GIVEN_SHARES", "OWNER", "metric_shares"]

OWNER = "_raydist_owner"
"""Where the class of a mirrored object has who mirrors it; that knows the shares of a metric."""

GIVEN_SHARES = "_raydist_shares"
"""Attribute of a metric whose states a checkpoint gave: those of each replica then, in the order of ranks."""


def metric_shares(metric: Any) -> list[dict[str, Any]]:
    """Those of several replicas, in the order of ranks; none of a metric that is nobody's, or changed here.

    >>> metric_shares(rd.Mean())
    []
    """
    owner = vars(type(metric)).get(OWNER)
    shares: list[dict[str, Any]] = [] if owner is None else owner.metric_shares(metric)
    return shares if len(shares) > 1 else []
