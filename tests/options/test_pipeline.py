from __future__ import annotations

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.options import AutoShardPolicy, Options


def test_pipeline_options_defaults_are_the_documented_ones() -> None:
    options = Options()
    assert (options.seed, options.deterministic, options.on_error) == (None, True, "raise")
    assert options.num_input_workers == 0
    assert options.auto_shard_policy is AutoShardPolicy.DATA
    assert (options.autotune.enabled, options.autotune.cpu_budget, options.autotune.ram_budget) == (True, None, None)
    off = {name for name in options.optimization.names() if not getattr(options.optimization, name)}
    assert off == {"map_vectorization"}


def test_pipeline_options_are_checked_when_they_are_set() -> None:
    options = Options()
    with pytest.raises(AttributeError, match="sed"):
        options.sed = 1  # type: ignore[attr-defined]  # the point of this test
    with pytest.raises(TypeError, match=r"Options\.deterministic must be a bool, got 1"):
        options.deterministic = 1  # type: ignore[assignment]  # the point of this test
    with pytest.raises(TypeError, match="auto_shard_policy must be one of"):
        Options(auto_shard_policy="DATA")
    with pytest.raises(TypeError, match="on_error must be one of 'raise', got 'skip'"):
        Options(on_error="skip")


def test_tensorflows_place_for_the_shard_policy() -> None:
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    assert options == Options(auto_shard_policy=AutoShardPolicy.OFF)
    assert repr(options.experimental_distribute) == f"DistributeOptions(auto_shard_policy={AutoShardPolicy.OFF!r})"
    dataset = Dataset.range(3).with_options(options)
    assert dataset.options().experimental_distribute.auto_shard_policy is AutoShardPolicy.OFF
    with pytest.raises(InvalidArgumentError, match="options of a dataset cannot be changed"):
        dataset.options().experimental_distribute.auto_shard_policy = AutoShardPolicy.FILE
    with pytest.raises(TypeError, match="auto_shard_policy must be one of"):
        options.experimental_distribute.auto_shard_policy = "off"  # type: ignore[assignment]  # the point of this test
    with pytest.raises(AttributeError, match="num_devices"):
        options.experimental_distribute.num_devices = 2  # type: ignore[attr-defined]  # the point of this test
