from __future__ import annotations

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

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (InputOptions, {"split": "rows"}, "split must be .* got 'rows'"),
    (InputOptions, {"num_input_workers": -2}, "num_input_workers must be >= 0 or AUTOTUNE, got -2"),
    (InputOptions, {"prefetch_batches": 0}, "prefetch_batches must be >= 1 or None, got 0"),
    (InputOptions, {"experimental_replication_mode": "each"}, "must be an InputReplicationMode or None, got 'each'"),
    (
        InputOptions,
        {"per_replica": True, "experimental_replication_mode": InputReplicationMode.PER_WORKER},
        "per_replica=True needs experimental_replication_mode=PER_REPLICA, got .*PER_WORKER",
    ),
    (
        InputOptions,
        {"experimental_place_dataset_on_device": True, "experimental_fetch_to_device": False},
        "needs experimental_replication_mode=PER_REPLICA, got None",
    ),
    (
        InputOptions,
        {"experimental_place_dataset_on_device": True, "per_replica": True},
        "needs experimental_fetch_to_device=False, got True",
    ),
    (InputOptions, {"experimental_per_replica_buffer_size": -1}, "must be >= 0 or None, got -1"),
    (
        InputOptions,
        {"experimental_per_replica_buffer_size": 2, "prefetch_batches": 3},
        r"mean the same and must not differ, got \(3, 2\)",
    ),
    (RunOptions, {"gradient_reduce_op": "MAX"}, "gradient_reduce_op must be SUM or MEAN, got 'MAX'"),
    (RunOptions, {"gradient_reduce_op": "average"}, "got 'average'"),
    (RunOptions, {"empty_batch": "skip"}, "empty_batch must be .* got 'skip'"),
    (RunOptions, {"on_nonfinite": "ignore"}, "on_nonfinite must be .* got 'ignore'"),
    (CommunicationOptions, {"bytes_per_pack": -1}, "bytes_per_pack must be a number of bytes >= 0, got -1"),
    (CommunicationOptions, {"timeout_seconds": 0}, "must be a finite number of seconds > 0, or None, got 0"),
    (CommunicationOptions, {"timeout_seconds": float("inf")}, "timeout_seconds must be .* got inf"),
    (CommunicationOptions, {"implementation": "mpi"}, "implementation must be one of auto, shm, .* got 'mpi'"),
    (CommunicationOptions, {"compression": "int8"}, "compression must be None, .* got 'int8'"),
]


def test_bad_values_are_refused() -> None:
    for kind, arguments, message in REFUSED:
        with pytest.raises(InvalidArgumentError, match=message):
            kind(**arguments)


def test_defaults_are_the_documented_ones() -> None:
    options = InputOptions()
    assert (options.split, options.num_input_workers, options.prefetch_batches) == ("per_batch", AUTOTUNE, None)
    spoken = CommunicationOptions()
    assert (spoken.bytes_per_pack, spoken.timeout_seconds) == (0, None)
    assert (spoken.implementation, spoken.compression) == ("auto", None)
    assert RunOptions(gradient_reduce_op="sum").gradient_reduce_op is ReduceOp.SUM  # type: ignore[arg-type]  # a name
    plain = Options()
    assert (plain.seed, plain.deterministic, plain.on_error, plain.num_input_workers) == (None, True, "raise", 0)
    assert plain.auto_shard_policy is AutoShardPolicy.DATA
    assert (plain.autotune.enabled, plain.autotune.cpu_budget, plain.autotune.ram_budget) == (True, None, None)
    off = {name for name in plain.optimization.names() if not getattr(plain.optimization, name)}
    assert off == {"map_vectorization"}


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


def test_what_a_call_says_wins_over_what_the_strategy_says() -> None:
    strategy = CommunicationOptions(bytes_per_pack=8, compression="bf16")
    call = CommunicationOptions(bytes_per_pack=4)
    assert strategy.merged(call) == CommunicationOptions(bytes_per_pack=4, compression="bf16")


def test_every_time_limit_is_finite_and_positive() -> None:
    values: list[Any] = [0, -1.0, float("inf"), float("nan"), None]
    for limit in fields(Timeouts):
        for value in values:
            with pytest.raises(InvalidArgumentError, match=rf"Timeouts\.{limit.name} must be a finite number"):
                Timeouts(**{limit.name: value})


def test_pipeline_options_are_checked_when_they_are_set() -> None:
    options = Options()
    with pytest.raises(AttributeError, match="no setting 'sed'. It has .*seed"):
        Options(sed=1)
    with pytest.raises(AttributeError, match="sed"):
        options.sed = 1  # type: ignore[attr-defined]  # the point of this test
    with pytest.raises(AttributeError, match="merge"):
        Options(merge=1)
    wrong: list[tuple[str, Any, str]] = [
        ("deterministic", 1, r"Options\.deterministic must be a bool, got 1"),
        ("auto_shard_policy", "DATA", "auto_shard_policy must be one of"),
        ("on_error", "skip", "on_error must be one of 'raise', got 'skip'"),
        ("num_input_workers", -1, "num_input_workers must be an int >= 0, got -1"),
        ("num_input_workers", True, "must be an int >= 0, got True"),
        ("num_input_workers", None, "must be an int >= 0, got None"),
        ("autotune", {}, "Options.autotune must be a AutotuneOptions, got {}"),
    ]
    for name, value, message in wrong:
        with pytest.raises(TypeError, match=message):
            Options(**{name: value})


def test_only_what_was_given_is_merged_and_what_is_frozen_stays_at_any_depth() -> None:
    one, other = Options(seed=1), Options(deterministic=False)
    one.autotune.ram_budget, other.autotune.enabled = 2, False
    merged = one.merge(other)
    assert (merged.seed, merged.deterministic) == (1, False)
    assert (merged.autotune.ram_budget, merged.autotune.enabled, merged.autotune.cpu_budget) == (2, False, None)
    assert merged != Options()
    frozen = merged.frozen()
    with pytest.raises(InvalidArgumentError, match="cannot be changed"):
        frozen.seed = 2
    with pytest.raises(InvalidArgumentError, match="cannot be changed"):
        frozen.autotune.cpu_budget = 2
    assert frozen.merge(Options(seed=4)).seed == 4


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
