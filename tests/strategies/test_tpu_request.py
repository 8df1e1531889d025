from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import raydist as rd
from raydist.strategies.tpu import TpuRequest
from raydist.tpu_slices.inventory import SliceShape

V4 = SliceShape.of("v4", "2x2x2")
TWO = rd.SimpleClusterResolver(rd.ClusterSpec({"worker": ["a:1", "b:1"]}), num_accelerators={"TPU": 4})


def scaling_config(**said: Any) -> Any:
    return SimpleNamespace(**{"use_tpu": True, "topology": None, "accelerator_type": None, "num_workers": 2, **said})


def test_a_resolver_that_agrees() -> None:
    assert TpuRequest.of(None, None, TWO).require(V4) is V4
    assert TpuRequest.of("2x2x2", "v4", rd.SimpleClusterResolver(rd.ClusterSpec({}))).require(V4) is V4
    config = scaling_config(topology="2X2X2", accelerator_type="TPU-V4")
    assert TpuRequest.of(None, "v4", config) == TpuRequest("2x2x2", "v4", 2)
    assert TpuRequest.of(None, None, scaling_config(num_workers=(1, 4))).num_hosts is None


def test_a_resolver_that_contradicts_the_slice() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"says 2 hosts, but a v4 slice 2x2x4 \(4 hosts .*\) has 4"):
        TpuRequest.of("2x2x4", "v4", TWO).require(SliceShape.of("v4", "2x2x4"))
    eight = rd.SimpleClusterResolver(rd.ClusterSpec({"worker": ["a:1", "b:1"]}), num_accelerators={"TPU": 8})
    with pytest.raises(rd.InvalidArgumentError, match="says 8 chips on each host, but a v4 slice"):
        TpuRequest.of(None, None, eight).require(V4)


def test_a_scaling_config_that_contradicts_the_arguments() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="topology of the slice is '2x2x2', but .* says '2x2x4'"):
        rd.TPUStrategy("2x2x2", "v4", scaling_config(topology="2x2x4"))
    with pytest.raises(rd.InvalidArgumentError, match="version of the slice is 'v4', but .* says 'v6e'"):
        rd.TPUStrategy(None, "v4", scaling_config(accelerator_type="TPU-V6E"))


@pytest.mark.parametrize("resolver", ["grpc://10.0.0.1", scaling_config(use_tpu=False), 2])
def test_what_is_no_resolver(resolver: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="must be an rd.ClusterResolver, or a ray.train.ScalingConfig"):
        rd.TPUStrategy(cluster_resolver=resolver)
