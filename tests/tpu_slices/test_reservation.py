"""Reserving slices is tested by `tests/strategies/test_tpu.py`, on nodes that say they have TPUs."""

from __future__ import annotations

import pytest

import raydist as rd
from raydist.tpu_slices.reservation import cluster_adds_tpus, tpu_hosts

pytestmark = pytest.mark.ray


def test_a_cluster_without_tpus_says_so_at_once(ray_cluster: None) -> None:
    assert tpu_hosts() == ()
    assert not cluster_adds_tpus()
    strategy = rd.TPUStrategy("2x2x2", "v4")
    with pytest.raises(rd.InvalidArgumentError, match="needs nodes with TPU chips, and the cluster has none"):
        _ = strategy.num_replicas_in_sync
    strategy.close()
