from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from ray._private.accelerators.tpu import VALID_TPU_TOPOLOGY, infer_tpu_pod_type_from_topology

import raydist as rd
from raydist.core.errors import InvalidArgumentError
from raydist.tpu_slices import reservation
from raydist.tpu_slices.inventory import (
    SliceShape,
    TpuHost,
    check_names,
    choose_shape,
    count_whole,
    describe_slices,
    num_chips,
    parse_version,
)
from raydist.tpu_slices.reservation import cluster_adds_tpus, place_slice, tpu_hosts

V4 = [TpuHost(f"10.0.0.{number}", 4, 4, "a", "v4-16", "2x2x2") for number in (1, 2)]
V6 = [TpuHost("10.0.1.1", 8, 8, "b", "v6e-8", "2x4")]
PLAIN = [TpuHost("10.0.2.1", 4, 4)]


def test_the_hosts_say_what_they_are() -> None:
    assert choose_shape(V4, None, None) == SliceShape("v4", "2x2x2", 2, 4)
    assert choose_shape(V6, None, "v6e") == SliceShape("v6e", "2x4", 1, 8)
    assert choose_shape([TpuHost("x", 4, 4, "c", "v6e-8", "2x4")] * 2, None, None).num_hosts == 2  # smaller machines
    assert choose_shape([*V4, *V6], "2x4", None).version == "v6e"
    assert choose_shape([*V4, *V6], None, "v4").topology == "2x2x2"
    assert choose_shape(PLAIN, "2x2", "v5litepod") == SliceShape("v5litepod", "2x2", 1, 4)  # without labels
    assert choose_shape([], "2x2x2", "v4", may_grow=True) == SliceShape("v4", "2x2x2", 2, 4)
    assert choose_shape(V6, "2x2x2", "v4", may_grow=True).num_hosts == 2


def test_what_is_not_there_is_answered_with_what_is() -> None:
    cases: list[tuple[list[TpuHost], str | None, str | None, bool, str]] = [
        ([*V4, *V6], None, None, False, "any slice matches 2 kinds of slices in .*: slice 'a' .* 10.0.0.2"),
        (V4, "2x2x4", "v5p", False, r"v5p 2x2x4 matches no kinds of .*: slice 'a' \(v4-16, 2x2x2\)"),
        (PLAIN, "2x2", None, False, "must name one kind of slice.*no pod type, no topology"),
        ([], "2x2x2", "v4", False, r"the cluster has none\. Start Ray on the hosts .*MirroredStrategy"),
        ([], "2x2x2", None, True, "pass topology and accelerator_version"),
    ]
    for hosts, topology, version, may_grow, message in cases:
        with pytest.raises(InvalidArgumentError, match=message):
            choose_shape(hosts, topology, version, may_grow=may_grow)


def test_a_slice_is_whole_when_all_of_its_hosts_are_there() -> None:
    shape = SliceShape.of("v4", "2x2x2")
    assert count_whole(V4, shape) == 1
    others = [TpuHost(f"10.0.3.{number}", 4, 0, "c", "v4-16", "2x2x2") for number in (1, 2)]
    assert count_whole([*V4, *V6, *others], shape) == 2  # taken, but there
    assert count_whole([V4[0], others[0]], shape) == 0  # two halves are no slice
    assert count_whole(PLAIN * 2, SliceShape.of("v5litepod", "2x2")) == 2
    assert count_whole([TpuHost("10.0.2.1", 8, 8)], SliceShape.of("v5litepod", "2x2")) == 0


def test_slices_are_listed_with_their_hosts() -> None:
    said = describe_slices([*V4, *PLAIN])
    assert "slice 'a' (v4-16, 2x2x2): host 10.0.0.1 with 4 of 4 chips free, host 10.0.0.2" in said
    assert "a host without a slice name (no pod type, no topology): host 10.0.2.1" in said


# --- shape ------------------------------------------------------------------------------------------------------------


def test_every_slice_is_whole_hosts_and_has_rays_name() -> None:
    for version, topologies in VALID_TPU_TOPOLOGY.items():
        for topology in topologies:
            shape = SliceShape.of(version, topology)
            assert shape.num_hosts * shape.chips_per_host == num_chips(topology)
            assert shape.pod_type == infer_tpu_pod_type_from_topology(topology, version)


def test_chips_of_early_and_late_versions_are_two_devices() -> None:
    devices = {version: SliceShape.of(version, "4x4").devices_per_host for version in ("v2", "v3", "v5litepod", "v6e")}
    assert devices == {"v2": 8, "v3": 8, "v5litepod": 4, "v6e": 4}
    assert SliceShape.of("v4", "2x2x2").devices_per_host == 4
    assert SliceShape.of("v7x", "2x2x2").devices_per_host == 8


def test_names_and_hosts_that_make_no_slice() -> None:
    with pytest.raises(InvalidArgumentError, match=r"The 8 chips of .* must fill whole hosts, .* each .* has 3"):
        SliceShape.of("v4", "2x2x2", chips_per_host=3)
    with pytest.raises(InvalidArgumentError, match="each TPU host of the cluster has 8"):
        SliceShape.of("v4", "2x2x1", chips_per_host=8)
    names: list[Any] = ["v1", "", "v4-8", 4]
    for name in names:
        with pytest.raises(InvalidArgumentError, match=rf"one of v2, v3, v4, v5p, v5litepod, v6e, v7x, got {name!r}"):
            parse_version(name)
    for topology in ("3x3", "2x2x2x2", "big", "", "4"):
        with pytest.raises(InvalidArgumentError, match=rf"must be one of 1x1, 2x2, .* \(v6e\), got {topology!r}"):
            check_names(topology, "v6e")
        with pytest.raises(InvalidArgumentError, match=f"topology must be one of .*, got {topology!r}"):
            check_names(topology, None)
    with pytest.raises(InvalidArgumentError, match=r"\(v4\), got '4x4'"):
        check_names("4x4", "v4")


# --- reservation; more of it is in `tests/strategies/test_tpu.py` -----------------------------------------------------


@pytest.mark.ray
def test_a_cluster_without_tpus_says_so_at_once(ray_cluster: None) -> None:
    assert tpu_hosts() == ()
    assert not cluster_adds_tpus()
    strategy = rd.TPUStrategy("2x2x2", "v4")
    with pytest.raises(rd.InvalidArgumentError, match="needs nodes with TPU chips, and the cluster has none"):
        _ = strategy.num_replicas_in_sync
    strategy.close()


class Granted:
    """A slice that Ray gives at once."""

    placement_group = mock.Mock()

    def release_head_pgs(self) -> None:
        """Nothing else wants it."""


def test_a_slice_of_one_host_is_asked_for_by_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of chips alone Ray could take a host of another slice."""
    asked = {}

    def grant(*shape: str, **options: Any) -> Granted:
        asked.update(options)
        return Granted()

    monkeypatch.setattr(reservation, "tpu_hosts", lambda: [*V4, TpuHost("10.0.0.3", 4, 4, "b", "v5litepod-4", "2x2")])
    monkeypatch.setattr(reservation, "slice_placement_group", grant)
    assert place_slice(SliceShape.of("v5litepod", "2x2"), name="one", timeout_s=5) is Granted.placement_group
    assert asked["bundle_label_selector"] == [{"ray.io/tpu-pod-type": "v5litepod-4", "ray.io/tpu-topology": "2x2"}]
    assert asked["resources_per_bundle"]["TPU"] == 4
