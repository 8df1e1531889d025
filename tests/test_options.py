from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import pytest

from raydist.dataset import Dataset
from raydist.errors import InvalidArgumentError
from raydist.options import AutoShardPolicy, InputOptions, Options, RunOptions, Timeouts
from raydist.values import AUTOTUNE, ReduceOp


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "rows"}, "split must be .* got 'rows'"),
        ({"num_input_workers": -2}, "num_input_workers must be >= 0 or AUTOTUNE, got -2"),
        ({"prefetch_batches": 0}, "prefetch_batches must be >= 1 or None, got 0"),
    ],
)
def test_input_options_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        InputOptions(**arguments)


def test_input_options_defaults_are_the_documented_ones() -> None:
    options = InputOptions()
    assert (options.split, options.num_input_workers, options.prefetch_batches) == ("per_batch", AUTOTUNE, None)
    assert pickle.loads(pickle.dumps(options)) == options


def test_run_options_take_a_reduction_by_name() -> None:
    assert RunOptions(gradient_reduce_op="sum").gradient_reduce_op is ReduceOp.SUM  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_reduce_op": "MAX"}, "gradient_reduce_op must be SUM or MEAN, got 'MAX'"),
        ({"gradient_reduce_op": "average"}, "got 'average'"),
        ({"empty_batch": "skip"}, "empty_batch must be .* got 'skip'"),
    ],
)
def test_run_options_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        RunOptions(**arguments)


@pytest.mark.parametrize("name", [limit.name for limit in fields(Timeouts)])
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), None])
def test_every_time_limit_is_finite_and_positive(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"Timeouts\.{name} must be a finite number"):
        Timeouts(**{name: value})


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
