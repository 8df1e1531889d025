from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import AUTOTUNE, ReduceOp
from raydist.dataset import Dataset
from raydist.options import (
    AutoShardPolicy,
    CommunicationOptions,
    InputOptions,
    InputReplicationMode,
    Options,
    RunOptions,
    Timeouts,
)
from raydist.options.settings import SettingsGroup, count, group, one_of, optional_count, typed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "rows"}, "split must be .* got 'rows'"),
        ({"num_input_workers": -2}, "num_input_workers must be >= 0 or AUTOTUNE, got -2"),
        ({"prefetch_batches": 0}, "prefetch_batches must be >= 1 or None, got 0"),
        ({"experimental_replication_mode": "each"}, "must be an InputReplicationMode or None, got 'each'"),
        (
            {"per_replica": True, "experimental_replication_mode": InputReplicationMode.PER_WORKER},
            "per_replica=True needs experimental_replication_mode=PER_REPLICA, got .*PER_WORKER",
        ),
        (
            {"experimental_place_dataset_on_device": True, "experimental_fetch_to_device": False},
            "needs experimental_replication_mode=PER_REPLICA, got None",
        ),
        (
            {"experimental_place_dataset_on_device": True, "per_replica": True},
            "needs experimental_fetch_to_device=False, got True",
        ),
        ({"experimental_per_replica_buffer_size": -1}, "must be >= 0 or None, got -1"),
        (
            {"experimental_per_replica_buffer_size": 2, "prefetch_batches": 3},
            r"mean the same and must not differ, got \(3, 2\)",
        ),
    ],
)
def test_input_options_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        InputOptions(**arguments)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (RunOptions, {"gradient_reduce_op": "MAX"}, "gradient_reduce_op must be SUM or MEAN, got 'MAX'"),
        (RunOptions, {"gradient_reduce_op": "average"}, "got 'average'"),
        (RunOptions, {"empty_batch": "skip"}, "empty_batch must be .* got 'skip'"),
        (RunOptions, {"on_nonfinite": "ignore"}, "on_nonfinite must be .* got 'ignore'"),
        (CommunicationOptions, {"bytes_per_pack": -1}, "bytes_per_pack must be a number of bytes >= 0, got -1"),
        (CommunicationOptions, {"timeout_seconds": 0}, "must be a finite number of seconds > 0, or None, got 0"),
        (CommunicationOptions, {"timeout_seconds": float("inf")}, "timeout_seconds must be .* got inf"),
        (CommunicationOptions, {"implementation": "mpi"}, "implementation must be one of auto, shm, .* got 'mpi'"),
        (CommunicationOptions, {"compression": "int8"}, "compression must be None, .* got 'int8'"),
    ],
)
def test_other_options_refuse(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        kind(**arguments)


def test_run_options_take_a_reduction_by_name() -> None:
    assert RunOptions(gradient_reduce_op="sum").gradient_reduce_op is ReduceOp.SUM  # type: ignore[arg-type]


def test_input_options_defaults_are_the_documented_ones() -> None:
    options = InputOptions()
    assert (options.split, options.num_input_workers, options.prefetch_batches) == ("per_batch", AUTOTUNE, None)
    assert pickle.loads(pickle.dumps(options)) == options


def test_tensorflows_names_mean_what_ours_mean() -> None:
    each = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    assert each.per_replica
    assert not InputOptions(experimental_replication_mode=InputReplicationMode.PER_WORKER).per_replica
    assert InputOptions(experimental_per_replica_buffer_size=4).prefetch_batches == 4
    assert InputOptions(experimental_per_replica_buffer_size=0, prefetch_batches=1).prefetch_batches == 1


def test_where_batches_come_to_lie() -> None:
    placed = {"experimental_place_dataset_on_device": True, "per_replica": True}
    assert not InputOptions().on_host
    assert InputOptions(experimental_fetch_to_device=False).on_host
    assert not InputOptions(experimental_fetch_to_device=False, **placed).on_host  # type: ignore[arg-type]  # two bools


def test_defaults_are_the_documented_ones_and_travel() -> None:
    options = CommunicationOptions()
    assert (options.bytes_per_pack, options.timeout_seconds) == (0, None)
    assert (options.implementation, options.compression) == ("auto", None)
    assert pickle.loads(pickle.dumps(options)) == options


def test_what_a_call_says_wins_over_what_the_strategy_says() -> None:
    strategy = CommunicationOptions(bytes_per_pack=8, compression="bf16")
    call = CommunicationOptions(bytes_per_pack=4)
    assert strategy.merged(call) == CommunicationOptions(bytes_per_pack=4, compression="bf16")


@pytest.mark.parametrize("name", [limit.name for limit in fields(Timeouts)])
def test_every_time_limit_is_finite_and_positive(name: str) -> None:
    values: list[Any] = [0, -1.0, float("inf"), float("nan"), None]
    for value in values:
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


class Inner(SettingsGroup):
    __slots__ = ()
    flag = typed(True, bool)
    limit = optional_count(None, 1)


class Outer(SettingsGroup):
    __slots__ = ()
    mode = one_of("a", "a", "b")
    size = count(3, 0)
    inner = group(Inner)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no setting 'sise'. It has mode, size, inner"):
        Outer(sise=1)
    with pytest.raises(AttributeError, match="sise"):
        Outer().sise = 1  # type: ignore[attr-defined]  # the point of this test
    with pytest.raises(AttributeError, match="merge"):
        Outer(merge=1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mode", "c", "Outer.mode must be one of 'a', 'b', got 'c'"),
        ("size", -1, "Outer.size must be an int >= 0, got -1"),
        ("size", True, "must be an int >= 0, got True"),
        ("size", None, "must be an int >= 0, got None"),
        ("inner", {}, "Outer.inner must be a Inner, got {}"),
    ],
)
def test_wrong_types_are_type_errors(name: str, value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        setattr(Outer(), name, value)
    with pytest.raises(TypeError, match="must be a bool, got 1"):
        Outer(inner=Inner(flag=1))


def test_only_what_was_given_is_merged() -> None:
    merged = Outer(size=1, inner=Inner(limit=2)).merge(Outer(mode="b", inner=Inner(flag=False)))
    assert merged == Outer(size=1, mode="b", inner=Inner(limit=2, flag=False))
    assert merged != Outer()


def test_frozen_settings_cannot_be_changed_at_any_depth() -> None:
    frozen = Outer(size=1).frozen()
    with pytest.raises(InvalidArgumentError, match="cannot be changed"):
        frozen.size = 2
    with pytest.raises(InvalidArgumentError, match="cannot be changed"):
        frozen.inner.limit = 2
    assert frozen.merge(Outer(size=4)).size == 4
