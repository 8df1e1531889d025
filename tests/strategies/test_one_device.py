from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd
from tests.forks import in_a_forked_child


@pytest.fixture
def strategy() -> Iterator[rd.Strategy]:
    with rd.OneDeviceStrategy("cpu") as made:
        yield made


def test_run_calls_here_and_now_with_plain_values(strategy: rd.Strategy) -> None:
    seen = []

    def add(x: int, y: int) -> int:
        seen.append(x)
        return x + y

    assert strategy.run(add, args=(1,), kwargs={"y": 2}) == 3
    assert seen == [1]


def test_a_step_knows_the_rows_of_its_batch(strategy: rd.Strategy) -> None:
    def rows(batch: torch.Tensor) -> tuple[int | None, int | None]:
        context = rd.get_replica_context()
        return context.num_rows, context.global_num_rows

    batches = strategy.distribute_dataset(rd.Dataset.range(5).batch(3))
    assert [strategy.run(rows, args=(batch,)) for batch in batches] == [(3, 3), (2, 2)]


def test_a_loop_in_the_step_draws_from_the_iterator(strategy: rd.Strategy) -> None:
    def rows_of_all(batches: Iterator[torch.Tensor]) -> list[int | None]:
        return [rd.get_replica_context().num_rows for _ in batches]

    batches = strategy.distribute_dataset(rd.Dataset.range(7).batch(3))
    assert strategy.run(rows_of_all, args=(iter(batches),)) == [3, 3, 1]


def test_its_dataset_is_the_dataset(strategy: rd.Strategy) -> None:
    dataset = rd.Dataset.range(10).shuffle(5, seed=3).batch(4)
    plain = [batch.tolist() for batch in dataset]
    assert [batch.tolist() for batch in strategy.distribute_dataset(dataset)] == plain


def test_numbers_and_values(strategy: rd.Strategy) -> None:
    assert (strategy.num_replicas_in_sync, strategy.worker_devices) == (1, ("CPU:0",))
    assert strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group) == 0
    assert strategy.local_results(5) == (5,)
    assert strategy.reduce(rd.ReduceOp.MEAN, torch.tensor([1.0, 3.0]), axis=0) == 2
    assert strategy.gather(torch.tensor([1, 2])).tolist() == [1, 2]


def test_a_function_gets_the_context_of_the_only_pipeline(strategy: rd.Strategy) -> None:
    def make(context: rd.InputContext) -> rd.Dataset:
        return rd.Dataset.range(4).batch(context.get_per_replica_batch_size(2))

    assert [batch.tolist() for batch in strategy.distribute_datasets_from_function(make)] == [[0, 1], [2, 3]]


def test_closing_twice_is_fine_and_nothing_runs_afterwards(strategy: rd.Strategy) -> None:
    strategy.close()
    strategy.close()
    with pytest.raises(rd.FailedPreconditionError, match="is closed and can't run a step"):
        strategy.run(len, args=([],))
    with pytest.raises(rd.FailedPreconditionError, match="is closed and can't distribute a dataset"):
        strategy.distribute_dataset(rd.Dataset.range(1).batch(1))


def test_closed_it_hands_out_no_batches(strategy: rd.Strategy) -> None:
    data = strategy.distribute_dataset(rd.Dataset.range(6).batch(2))
    begun = iter(data)
    next(begun)
    strategy.close()
    for iterator in (begun, iter(data)):
        with pytest.raises(rd.FailedPreconditionError, match="is closed and can't read a distributed dataset"):
            next(iterator)


@pytest.mark.parametrize("device", ["tpu", "cpu:x", "", None, 3])
def test_unknown_devices_are_named(device: object) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="A device must be named like"):
        rd.OneDeviceStrategy(device)


def test_a_gpu_that_is_not_there_is_an_error_when_the_strategy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rd.OneDeviceStrategy("GPU:1").worker_devices == ("GPU:1",)
    with pytest.raises(rd.InvalidArgumentError, match=r"GPU:2 was asked for, and torch sees 2 GPUs.*use \"CPU:0\""):
        rd.OneDeviceStrategy("cuda:2")


def test_an_error_of_the_step_is_raised_as_it_is(strategy: rd.Strategy) -> None:
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    assert strategy.run(lambda: pickle.loads(pickle.dumps("goes on"))) == "goes on"


def test_rows_of_a_batch_are_known_by_any_of_its_leaves_as_long_as_it_lives() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    batches = list(
        strategy.distribute_dataset(rd.Dataset.from_tensor_slices({"x": np.arange(5), "y": np.arange(5)}).batch(3))
    )

    def num_rows(value: Any) -> int | None:
        context = rd.get_replica_context()
        assert context is not None
        return context.num_rows

    assert [strategy.run(num_rows, args=(batch["y"],)) for batch in batches] == [3, 2]
    assert strategy.run(num_rows, args=((7, batches[1]["x"]),)) == 2
    assert strategy.run(num_rows, args=(torch.arange(5),)) is None
    assert len(strategy._batches._noted) == 4
    del batches
    assert not strategy._batches._noted


def test_arguments_reach_the_function_as_they_are() -> None:
    held: dict[str, Any] = {"x": torch.ones(1)}
    assert rd.OneDeviceStrategy("cpu").run(lambda value: value, args=(held,)) is held


def test_a_forked_child_is_told_as_under_every_strategy() -> None:
    strategy = rd.OneDeviceStrategy("cpu")

    def child() -> None:
        with pytest.raises(rd.FailedPreconditionError, match="this is its forked child"):
            strategy.run(len, args=([],))
        assert rd.OneDeviceStrategy("cpu").run(len, args=([],)) == 0

    assert in_a_forked_child(child) == 0
    assert strategy.run(len, args=([],)) == 0


def test_an_error_of_a_step_says_which_it_was() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    empty: dict[str, int] = {}
    strategy.run(lambda: None)
    with pytest.raises(KeyError) as caught:
        strategy.run(lambda: empty["mine"])
    assert caught.value.__notes__ == ["In step 1 on replica 0 (cpu)."]
