from __future__ import annotations

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.tpu_slices.inventory import TpuHost, choose_shape, count_whole, describe_slices
from raydist.tpu_slices.shape import SliceShape

V4 = [TpuHost(f"10.0.0.{number}", 4, 4, "a", "v4-16", "2x2x2") for number in (1, 2)]
V6 = [TpuHost("10.0.1.1", 8, 8, "b", "v6e-8", "2x4")]
PLAIN = [TpuHost("10.0.2.1", 4, 4)]


def test_the_hosts_say_what_they_are() -> None:
    assert choose_shape(V4, None, None) == SliceShape("v4", "2x2x2", 2, 4)
    assert choose_shape(V6, None, "v6e") == SliceShape("v6e", "2x4", 1, 8)
    assert choose_shape([TpuHost("x", 4, 4, "c", "v6e-8", "2x4")] * 2, None, None).num_hosts == 2  # smaller machines


def test_one_of_several_kinds_must_be_named() -> None:
    assert choose_shape([*V4, *V6], "2x4", None).version == "v6e"
    assert choose_shape([*V4, *V6], None, "v4").topology == "2x2x2"
    with pytest.raises(InvalidArgumentError, match="any slice is 2 kinds of those in .*: slice 'a' .* 10.0.0.2"):
        choose_shape([*V4, *V6], None, None)


def test_what_is_not_there_is_answered_with_what_is() -> None:
    with pytest.raises(InvalidArgumentError, match=r"v5p 2x2x4 is none of .*: slice 'a' \(v4-16, 2x2x2\)"):
        choose_shape(V4, "2x2x4", "v5p")


def test_hosts_without_labels_are_what_they_are_called() -> None:
    assert choose_shape(PLAIN, "2x2", "v5litepod") == SliceShape("v5litepod", "2x2", 1, 4)
    with pytest.raises(InvalidArgumentError, match="must name one kind of slice.*no pod type, no topology"):
        choose_shape(PLAIN, "2x2", None)


def test_a_cluster_without_tpus() -> None:
    with pytest.raises(InvalidArgumentError, match=r"the cluster has none\. Start Ray on the hosts .*MirroredStrategy"):
        choose_shape([], "2x2x2", "v4")
    assert choose_shape([], "2x2x2", "v4", may_grow=True) == SliceShape("v4", "2x2x2", 2, 4)
    assert choose_shape(V6, "2x2x2", "v4", may_grow=True).num_hosts == 2
    with pytest.raises(InvalidArgumentError, match="name topology and accelerator_version"):
        choose_shape([], "2x2x2", None, may_grow=True)


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
    assert "a host without a slice's name (no pod type, no topology): host 10.0.2.1" in said
