from __future__ import annotations

import pytest
from ray._private.accelerators.tpu import VALID_TPU_TOPOLOGY, infer_tpu_pod_type_from_topology

from raydist.core.errors import InvalidArgumentError
from raydist.tpu_slices.shape import SliceShape, check_names, num_chips, parse_version


@pytest.mark.parametrize("version", sorted(VALID_TPU_TOPOLOGY))
def test_every_slice_is_whole_hosts_and_has_rays_name(version: str) -> None:
    for topology in VALID_TPU_TOPOLOGY[version]:
        shape = SliceShape.of(version, topology)
        assert shape.num_hosts * shape.chips_per_host == num_chips(topology)
        assert shape.pod_type == infer_tpu_pod_type_from_topology(topology, version)


def test_chips_of_early_and_late_versions_are_two_devices() -> None:
    devices = {version: SliceShape.of(version, "4x4").devices_per_host for version in ("v2", "v3", "v5litepod", "v6e")}
    assert devices == {"v2": 8, "v3": 8, "v5litepod": 4, "v6e": 4}
    assert SliceShape.of("v4", "2x2x2").devices_per_host == 4
    assert SliceShape.of("v7x", "2x2x2").devices_per_host == 8


def test_hosts_that_do_not_make_up_the_slice() -> None:
    with pytest.raises(InvalidArgumentError, match=r"The 8 chips of topology '2x2x2' must be .* each .* has 3"):
        SliceShape.of("v4", "2x2x2", chips_per_host=3)
    with pytest.raises(InvalidArgumentError, match="each TPU host here has 8"):
        SliceShape.of("v4", "2x2x1", chips_per_host=8)


@pytest.mark.parametrize("name", ["v1", "H100", "", "v4-8", 4])
def test_an_unknown_version_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"one of v2, v3, v4, v5p, v5litepod, v6e, v7x, got {name!r}"):
        parse_version(name)


@pytest.mark.parametrize("topology", ["3x3", "2x2x2x2", "big", "", "4"])
def test_a_topology_that_is_none_is_answered_with_those_of_the_version(topology: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"topology must be one of 1x1, 2x2, .* \(v6e\), got {topology!r}"):
        check_names(topology, "v6e")
    with pytest.raises(InvalidArgumentError, match=f"topology must be one of .*, got {topology!r}"):
        check_names(topology, None)


def test_a_topology_of_another_version() -> None:
    with pytest.raises(InvalidArgumentError, match=r"\(v4\), got '4x4'"):
        check_names("4x4", "v4")
