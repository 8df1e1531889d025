from __future__ import annotations

import pickle
from typing import Any

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import AUTOTUNE
from raydist.options import InputOptions, InputReplicationMode


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
