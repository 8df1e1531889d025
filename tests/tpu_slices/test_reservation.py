"""Reserving slices is tested by `tests/strategies/test_tpu.py`, on nodes that say they have TPUs."""

from __future__ import annotations

import pytest
import ray
from ray.util.placement_group import placement_group_table, remove_placement_group

import raydist as rd
from raydist.tpu_slices.reservation import cluster_adds_tpus, place_slice, tpu_hosts
from raydist.tpu_slices.shape import SliceShape
from tests.tpu_nodes import tpu_slice

pytestmark = pytest.mark.ray


def test_a_cluster_without_tpus_says_so_at_once(ray_cluster: None) -> None:
    assert tpu_hosts() == ()
    assert not cluster_adds_tpus()
    strategy = rd.TPUStrategy("2x2x2", "v4")
    with pytest.raises(rd.InvalidArgumentError, match="needs nodes with TPU chips, and the cluster has none"):
        _ = strategy.num_replicas_in_sync
    strategy.close()


def test_a_slice_of_one_host_is_not_placed_on_a_host_of_another(ray_cluster: None) -> None:
    """Of four hosts that have room, one is meant."""
    with (
        tpu_slice("slice-c", "v4", "2x2x1", chips=1),
        tpu_slice("slice-d", "v5litepod", "1x1"),
    ):
        group = place_slice(SliceShape.of("v5litepod", "1x1"), name="one host", timeout_s=60)
        (node,) = placement_group_table(group)["bundles_to_node_id"].values()
        remove_placement_group(group)
        labels = {each["NodeID"]: each["Labels"] for each in ray.nodes()}[node]
    assert labels["ray.io/tpu-slice-name"] == "slice-d"
