"""What `strategy.run` promises, on real replicas."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import nn

import raydist as rd
from tests.conftest import live_actors

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def rows(strategy: rd.Strategy, values: list[list[float]]) -> rd.PerReplica:
    made = strategy.distribute_values_from_function(
        lambda ctx: torch.tensor(values[ctx.replica_id_in_sync_group], dtype=torch.float64)
    )
    assert isinstance(made, rd.PerReplica)
    return made


def test_arguments_are_split_or_sent_to_all(two: rd.MirroredStrategy) -> None:
    def step(mine: torch.Tensor, common: int, *, named: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        return mine + named, common, rd.get_replica_context().replica_id_in_sync_group

    mine = rows(two, [[1.0], [2.0]])
    total, common, rank = two.run(step, args=(mine, 7), kwargs={"named": torch.tensor(10.0)})
    assert [value.tolist() for value in total.values] == [[11.0], [12.0]]
    assert common.values == (7, 7)
    assert rank.values == (0, 1)


def test_nests_come_back_as_nests_and_none_as_none(two: rd.MirroredStrategy) -> None:
    def step() -> dict[str, Any]:
        return {"a": (1, None), "b": "text"}

    result = two.run(step)
    assert result["a"][0].values == (1, 1)
    assert result["a"][1] is None
    assert two.local_results(result["b"]) == ("text", "text")
    assert two.run(lambda: None) is None


def test_results_of_one_step_feed_the_next_without_the_driver(two: rd.MirroredStrategy) -> None:
    first = two.run(lambda x: x * 2, args=(rows(two, [[1.0], [2.0]]),))
    second = two.run(lambda x, y: x + y, args=(first, first))
    assert two.gather(second, 0).tolist() == [4.0, 8.0]


def test_dispatch_does_not_wait(two: rd.MirroredStrategy) -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.4)
        return x

    x = rows(two, [[1.0], [2.0]])
    two.run(slow, args=(x,))  # the first call waits, to learn what nest comes back
    start = time.monotonic()
    results = [two.run(slow, args=(x,)) for _ in range(3)]
    dispatched = time.monotonic() - start
    values = [two.reduce("SUM", result, axis=0).item() for result in results]
    assert dispatched < 0.8 < time.monotonic() - start
    assert values == [3.0, 3.0, 3.0]


def test_gradients_are_global_when_backward_returns(two: rd.MirroredStrategy) -> None:
    with two.scope():
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        (weight * x).mean().backward()
        assert weight.grad is not None
        return weight.grad

    data = rd.Dataset.from_tensor_slices(np.array([1.0, 2.0, 6.0])).batch(3)
    for batch in two.distribute_dataset(data):
        grads = two.run(step, args=(batch,))
        assert [grad.item() for grad in grads.values] == [3.0, 3.0]
    plain = two.run(step, args=(rows(two, [[1.0, 2.0], [6.0]]),))
    assert plain.values[0].item() == (1.5 + 6.0) / 2


def test_sum_adds_gradients(two: rd.MirroredStrategy) -> None:
    with two.scope():
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        ctx = rd.get_replica_context()
        denominator = ctx.all_reduce(rd.ReduceOp.SUM, len(x))
        ((weight * x).sum() / denominator).backward()
        assert weight.grad is not None
        return weight.grad

    options = rd.RunOptions(gradient_reduce_op=rd.ReduceOp.SUM)
    grads = two.run(step, args=(rows(two, [[1.0, 2.0], [6.0]]),), options=options)
    assert [grad.item() for grad in grads.values] == [3.0, 3.0]


def test_collectives_in_a_step(two: rd.MirroredStrategy) -> None:
    def step(x: torch.Tensor) -> dict[str, Any]:
        ctx = rd.get_replica_context()
        rank = ctx.replica_id_in_sync_group
        return {
            "sum": ctx.all_reduce("SUM", {"x": x.sum()})["x"],
            "mean": ctx.all_reduce("MEAN", rank),
            "all": ctx.all_gather(x, 0),
            "merged": ctx.merge_call(lambda strategy, r: strategy.reduce("SUM", r), args=(rank,)),
            "count": ctx.num_replicas_in_sync,
            "strategy": ctx.strategy.num_replicas_in_sync,
        }

    result = two.run(step, args=(rows(two, [[1.0, 2.0], [4.0]]),))
    assert [v.item() for v in result["sum"].values] == [7.0, 7.0]
    assert [v.item() for v in result["mean"].values] == [0.5, 0.5]
    assert [v.tolist() for v in result["all"].values] == [[1.0, 2.0, 4.0]] * 2
    assert [v.item() for v in result["merged"].values] == [1, 1]
    assert result["count"].values == result["strategy"].values == (2, 2)


def test_mismatched_collectives_are_shown_on_all_replicas(two: rd.MirroredStrategy) -> None:
    def step(x: torch.Tensor) -> Any:
        return rd.get_replica_context().all_reduce("SUM", x)

    with pytest.raises(rd.CollectiveMismatchError, match=r"(?s)\(1,\).*\(2,\)|\[1\].*\[2\]"):
        two.run(step, args=(rows(two, [[1.0], [2.0, 3.0]]),))
    assert two.gather(two.run(step, args=(rows(two, [[1.0], [2.0]]),)), 0).tolist() == [3.0, 3.0]


def test_gradients_travel_through_a_group_of_ray(two: rd.MirroredStrategy) -> None:
    def groups(name: str) -> tuple[bool, str]:
        from ray.util import collective

        tensor = torch.ones(2)
        collective.allreduce(tensor, name)
        return bool((tensor == 2).all()), collective.get_group_handle(name).backend()

    doubled, backend = two.run(groups, args=(f"{two._name}-gradients",))
    assert doubled.values == (True, True)
    assert backend.values == ("RAYDIST", "RAYDIST")


def test_a_step_may_reach_its_strategy(two: rd.MirroredStrategy) -> None:
    def step() -> tuple[int, bool]:
        return two.num_replicas_in_sync, two is rd.get_strategy()

    count, same = two.run(step)
    assert count.values == (2, 2)
    assert same.values == (True, True)


def test_a_parameter_made_in_a_step_would_not_be_mirrored(two: rd.MirroredStrategy) -> None:
    with two.scope():
        model = nn.Linear(1, 1)

    def step() -> None:
        model.extra = nn.Parameter(torch.zeros(1))

    two.run(step)
    with pytest.raises(rd.FailedPreconditionError, match="extra"):
        model.weight.tolist()


def test_replicas_follow_the_drivers_seed_on_streams_of_their_own(two: rd.MirroredStrategy) -> None:
    def draw() -> torch.Tensor:
        value = torch.rand(3)
        return value

    torch.manual_seed(5)
    first = two.run(draw).values
    torch.manual_seed(6)
    two.run(draw)
    torch.manual_seed(5)
    again = two.run(draw).values
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])


def test_an_error_on_one_replica_surfaces_and_the_strategy_goes_on(two: rd.MirroredStrategy) -> None:
    with two.scope():
        model = nn.Linear(1, 1)

    def step(x: torch.Tensor, fails_on: int) -> Any:
        ctx = rd.get_replica_context()
        if ctx.replica_id_in_sync_group == fails_on:
            raise KeyError("my own error")
        return ctx.all_reduce("SUM", model(x.float().view(-1, 1)).sum())

    x = rows(two, [[1.0], [2.0]])
    for fails_on in (0, 1):
        with pytest.raises(KeyError, match="my own error") as caught:
            two.local_results(two.run(step, args=(x, fails_on)))
        assert f"on replica {fails_on}" in "".join(caught.value.__notes__)
        values = two.run(step, args=(x, -1)).values
        assert values[0] == values[1]


class Departure(BaseException):
    """No Exception, and does not end its process."""


class Odd(Exception):
    """Wants two arguments, has no message, and its notes are no list."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)
        self.__notes__ = "odd"  # type: ignore[assignment]  # what users do

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(("kind", "args"), [(Departure, ("left",)), (Odd, (1, 2))])
def test_any_error_of_a_step_keeps_its_type_and_names_replica_and_step(
    two: rd.MirroredStrategy, kind: type[BaseException], args: tuple[Any, ...]
) -> None:
    def step(fails: bool) -> int:
        if fails and rd.get_replica_context().replica_id_in_sync_group == 1:
            raise kind(*args)
        return 1

    with pytest.raises(kind) as caught:
        two.local_results(two.run(step, args=(True,)))
    assert caught.value.args == args[:1]
    host = re.escape(f"of node {ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:8]}).")
    assert re.search(rf"In step \d+ on replica 1 \(cpu\) {host}", "".join(caught.value.__notes__))
    assert two.run(step, args=(False,)).values == (1, 1)


def test_an_error_of_a_dispatched_step_comes_with_the_next_synchronising_call(two: rd.MirroredStrategy) -> None:
    def step(fail: bool) -> int:
        assert not fail, "asked to fail"
        return 1

    two.run(step, args=(False,))
    result = two.run(step, args=(True,))
    with pytest.raises(AssertionError, match="asked to fail"):
        two.local_results(result)
    assert two.run(step, args=(False,)).values == (1, 1)


def test_an_old_error_read_late_harms_nothing(two: rd.MirroredStrategy) -> None:
    def step(fail: bool) -> int:
        assert not fail, "asked to fail"
        return 1

    two.run(step, args=(False,))
    failed = two.run(step, args=(True,))
    for _ in range(2):
        with pytest.raises(AssertionError, match="asked to fail"):
            two.local_results(failed)
        assert two.run(lambda: rd.get_replica_context().all_reduce("SUM", 1.0).item()).values == (2.0, 2.0)


def test_what_cannot_be_pickled_is_named(two: rd.MirroredStrategy) -> None:
    lock = threading.Lock()

    def step() -> bool:
        return lock.locked()

    with pytest.raises((TypeError, rd.FailedPreconditionError), match="lock"):
        two.run(step)
    with pytest.raises(rd.SpecError, match="got lock"):
        two.run(lambda: threading.Lock())


def test_loops_inside_the_replicas(two: rd.MirroredStrategy) -> None:
    dataset = rd.Dataset.range(10).batch(4)

    def loop(iterator: Any) -> tuple[list[Any], list[Any]]:
        seen, counts = [], []
        for batch in iterator:
            seen.append(batch.tolist())
            counts.append(rd.get_replica_context().num_rows)
        return [seen], [counts]

    seen, counts = two.run(loop, args=(iter(two.distribute_dataset(dataset)),))
    assert seen.values == ([[[0, 1], [4, 5], [8]]], [[[2, 3], [6, 7], [9]]])
    assert counts.values == ([[2, 2, 1]], [[2, 2, 1]])


def test_a_loop_that_ends_without_rows_keeps_its_result(two: rd.MirroredStrategy) -> None:
    def loop(iterator: Any) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.int64)
        for batch in iterator:
            if rd.get_replica_context().num_rows:
                total = total + batch.sum()
        return total

    totals = two.run(loop, args=(iter(two.distribute_dataset(rd.Dataset.range(9).batch(4))),))
    assert [total.item() for total in totals.values] == [0 + 1 + 4 + 5 + 8, 2 + 3 + 6 + 7]


@pytest.mark.parametrize("num_rows", [50, 7, 4, 1])
def test_the_mean_of_a_loss_is_the_global_batchs(num_rows: int, mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    strategy = mirrored(3)
    x = np.random.default_rng(0).normal(size=num_rows)
    (batch,) = strategy.distribute_dataset(rd.Dataset.from_tensor_slices(x).batch(num_rows))
    for empty in ("stand_in", "zero_rows"):
        options = rd.RunOptions(empty_batch=empty)
        loss = strategy.run(lambda rows: {"mean": rows.mean(), "size": len(rows)}, args=(batch,), options=options)
        assert strategy.reduce("MEAN", loss)["mean"].item() == pytest.approx(x.mean(), rel=1e-12)
        assert strategy.reduce("SUM", loss)["size"].item() == num_rows


def test_the_mean_of_what_a_loop_gives_weighs_all_that_it_drew(mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    strategy = mirrored(3)

    def loop(iterator: Any) -> torch.Tensor:
        context = rd.get_replica_context()
        return torch.cat([rows for rows in iterator if context.num_rows]).mean()

    data = rd.Dataset.range(17).batch(5).map(lambda rows: rows * 1.0)  # 2 + 2 + 1 three times, then 1 + 1 + 0
    mean = strategy.reduce("MEAN", strategy.run(loop, args=(iter(strategy.distribute_dataset(data)),)))
    assert mean.item() == pytest.approx(8.0)
    equal = strategy.run(lambda: rd.get_replica_context().replica_id_in_sync_group)
    assert strategy.reduce("MEAN", equal).item() == 1.0


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_batch_in_both_contexts(num_replicas: int, mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    strategy = mirrored(num_replicas)
    data = rd.Dataset.from_tensor_slices((np.arange(4), np.arange(4) * 10)).batch(4)
    (batch,) = strategy.distribute_dataset(data)
    numbers, tens = batch
    pieces = {1: [[0, 1, 2, 3]], 3: [[0, 1], [2, 3], []]}[num_replicas]
    assert [value.tolist() for value in strategy.local_results(numbers)] == pieces
    out = strategy.run(lambda n, t: (n * 10 == t).all(), args=(numbers, tens))
    assert bool(strategy.reduce("MEAN", out).item() == 1)


def test_a_replica_without_rows_counts_nothing(mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        model = nn.BatchNorm1d(1, momentum=1.0)
        weight = nn.Parameter(torch.ones(1))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, int | None, int]:
        y = model(x.view(-1, 1))
        weight.grad = None
        (weight * y + x.view(-1, 1)).mean().backward()
        ctx = rd.get_replica_context()
        return x, ctx.num_rows, len(x)

    data = rd.Dataset.from_tensor_slices(np.array([1.0, 3.0, 5.0, 9.0], dtype=np.float32)).batch(4)
    (batch,) = strategy.distribute_dataset(data)
    x, num_rows, _ = strategy.run(step, args=(batch,))
    assert strategy.gather(x).tolist() == [1.0, 3.0, 5.0, 9.0]
    assert num_rows.values == (2, 2)
    buffers = strategy.run(lambda: model.running_mean.item()).values  # type: ignore[union-attr]
    assert buffers == (2.0, 7.0, 2.0)
    (batch,) = strategy.distribute_dataset(data)
    zero = strategy.run(lambda b: len(b), args=(batch,), options=rd.RunOptions(empty_batch="zero_rows"))
    assert zero.values == (2, 2, 0)


def test_a_replica_that_stands_in_adds_nothing_to_collectives(mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def step(x: torch.Tensor) -> dict[str, Any]:
        ctx = rd.get_replica_context()
        weight.grad = None
        count = ctx.all_reduce("SUM", len(x))
        ((weight * x).sum() / count).backward()
        assert weight.grad is not None
        return {
            "grad": weight.grad.item(),
            "count": count.item(),
            "mean": ctx.all_reduce("MEAN", x.sum()).item(),
            "min": ctx.all_reduce("MIN", x.min()).item(),
            "max": ctx.all_reduce("MAX", x.max()).item(),
            "all": ctx.all_gather(x, 0),
            "merged": ctx.merge_call(lambda s, r: len(r.values), args=(0,)),
        }

    data = rd.Dataset.from_tensor_slices(np.array([8.0, 4.0])).batch(2)
    (batch,) = strategy.distribute_dataset(data)
    result = strategy.run(step, args=(batch,), options=rd.RunOptions(gradient_reduce_op="SUM"))  # type: ignore[arg-type]
    found = {name: strategy.local_results(leaf)[0] for name, leaf in result.items() if name != "all"}
    assert found == {"grad": 6.0, "count": 2, "mean": 6.0, "min": 4.0, "max": 8.0, "merged": 3}
    assert result["all"].values[0].tolist() == [8.0, 4.0]


def test_local_results_of_nests_are_nests(two: rd.MirroredStrategy) -> None:
    data = rd.Dataset.from_tensor_slices((np.arange(3), np.arange(3) * 10)).batch(3)
    (batch,) = two.distribute_dataset(data)
    first, second = two.local_results(batch)
    assert [leaf.tolist() for leaf in first + second] == [[0, 1], [0, 10], [2], [20]]


def test_an_error_is_told_once(ray_cluster: None) -> None:
    strategy = rd.MirroredStrategy(1, resources_per_replica={"CPU": 0.01})
    with strategy, pytest.raises(ZeroDivisionError):
        strategy.local_results(strategy.run(lambda: 1 / 0))
    assert strategy._closed


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (3, (), "needs a function, got 3"),
        (len, rd.PerReplica([1, 2]), r"must be a tuple of the function's arguments, got PerReplica"),
        (len, "distributed", r"iter\(dataset\)"),
    ],
)
@pytest.mark.parametrize("kind", ["mirrored", "one device"])
def test_bad_calls(two: rd.MirroredStrategy, kind: str, fn: Any, args: Any, message: str) -> None:
    strategy = two if kind == "mirrored" else rd.OneDeviceStrategy()
    if args == "distributed":
        args = (strategy.distribute_dataset(rd.Dataset.range(3).batch(1)),)
    with pytest.raises(rd.InvalidArgumentError, match=message):
        strategy.run(fn, args=args)


def test_a_dataset_function_must_give_a_dataset(two: rd.MirroredStrategy) -> None:
    with pytest.raises(rd.SpecError, match="raydist.Dataset must be given, got list"):
        two.distribute_datasets_from_function(lambda ctx: [1])  # type: ignore[arg-type, return-value]


def test_the_older_spellings_work(two: rd.MirroredStrategy) -> None:
    dataset = two.experimental_make_numpy_dataset(np.arange(4)).batch(2)
    (first, _) = two.experimental_distribute_dataset(dataset)
    assert two.experimental_local_results(two.experimental_run_v2(lambda x: x.sum(), args=(first,))) == (0, 1)


@pytest.mark.parametrize("ending", ["close", "error in a step", "error on the driver"])
def test_variables_keep_their_final_values(ray_cluster: None, ending: str) -> None:
    strategy = rd.MirroredStrategy(1, resources_per_replica={"CPU": 0.01})

    def train() -> None:
        with torch.no_grad():
            weight.add_(1.0)

    def fail() -> None:
        raise KeyError("from the step")

    with contextlib.suppress(KeyError), strategy:
        with strategy.scope():
            weight = nn.Parameter(torch.zeros(2))
        strategy.run(train)
        if ending == "error in a step":
            strategy.run(fail)
            assert weight.tolist() == [], "reading must raise the step's error"
        if ending == "error on the driver":
            raise KeyError
    assert type(weight) is nn.Parameter
    assert weight.tolist() == [1.0, 1.0]


def test_a_dropped_strategy_leaves_nothing(ray_cluster: None) -> None:
    before = live_actors()
    strategy = rd.MirroredStrategy(1, resources_per_replica={"CPU": 0.01})
    strategy.run(lambda: None)
    assert live_actors() - before
    del strategy
    gc.collect()
    end = time.monotonic() + 10
    while live_actors() - before and time.monotonic() < end:
        time.sleep(0.05)
    assert live_actors() - before == set()


def test_what_was_made_outside_of_the_scope_is_named(two: rd.MirroredStrategy) -> None:
    outside = nn.Linear(1, 1)
    foreign = torch.optim.SGD(outside.parameters(), lr=0.1)
    with pytest.raises(
        rd.FailedPreconditionError, match=r"under the scope of MirroredStrategy-.*parameter .* of module Linear"
    ):
        two.run(lambda: outside.weight.sum())
    with pytest.raises(rd.FailedPreconditionError, match=r"under the scope of MirroredStrategy-.*of optimizer SGD"):
        two.run(lambda: foreign.step())


def test_a_variable_of_another_strategy_is_named(two: rd.MirroredStrategy) -> None:
    with two.scope():
        model = nn.Linear(1, 1)

    def step() -> float:
        return float(model.weight.sum())

    two.run(step)
    other = rd.MirroredStrategy(1, resources_per_replica={"CPU": 0.01})
    message = f"belongs to another one than {other._name}"
    with other, pytest.raises(rd.FailedPreconditionError, match=message):
        other.run(step)


def test_an_empty_dataset_gives_no_batch(two: rd.MirroredStrategy) -> None:
    empty = rd.Dataset.from_tensor_slices(np.zeros((0, 3))).batch(4)
    assert list(two.distribute_dataset(empty)) == []
    with pytest.raises(rd.OutOfRangeError, match="no further batch"):
        iter(two.distribute_dataset(empty)).get_next()


def test_nothing_runs_after_close() -> None:
    strategy = rd.MirroredStrategy(2)
    strategy.close()
    strategy.close()
    with pytest.raises(rd.FailedPreconditionError, match="is closed and can't run a step"):
        strategy.run(lambda: None)
    with pytest.raises(rd.FailedPreconditionError, match="is closed and can't distribute"):
        strategy.distribute_dataset(rd.Dataset.range(3).batch(1))


@pytest.mark.parametrize("bad", ["quantum:0", ["cpu", "cuda:0"], 0, []])
def test_bad_devices_fail_before_anything_starts(bad: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="got"):
        rd.MirroredStrategy(bad)


def test_more_replicas_than_fit(ray_cluster: None) -> None:
    strategy = rd.MirroredStrategy(64, timeouts=rd.Timeouts(start_s=1.0))
    with pytest.raises(
        rd.DeadlineExceededError, match=r"could not place 64 replicas within 1 s. Asked: 64 x .*CPU.*free"
    ):
        strategy.scope().__enter__()
    strategy.close()


def test_only_datasets_can_be_distributed(two: rd.MirroredStrategy) -> None:
    with pytest.raises(rd.SpecError, match="raydist.Dataset must be given, got list"):
        two.distribute_dataset([1, 2, 3])  # type: ignore[arg-type]


def whole_and_state(strategy: rd.MirroredStrategy) -> list[int]:
    """Sums of the batches of a dataset, half of it read by the driver, the rest behind its state by the replicas."""
    dataset = strategy.distribute_dataset(rd.Dataset.range(8).batch(4))
    iterator = iter(dataset)
    sums = [int(strategy.reduce("SUM", strategy.run(lambda x: x.sum(), args=(next(iterator),)), axis=None))]
    resumed = iter(dataset)
    resumed.load_state_dict(iterator.state_dict())
    rest = strategy.run(lambda batches: sum(int(x.sum()) for x in batches), args=(resumed,))
    return [*sums, sum(rest.values)]


def test_distributed_iterators_work_in_threads_and_event_loops(two: rd.MirroredStrategy) -> None:
    async def in_a_loop() -> list[int]:
        return whole_and_state(two)

    async def beside_a_loop() -> list[int]:
        return await asyncio.to_thread(whole_and_state, two)

    found = [whole_and_state(two), asyncio.run(in_a_loop()), asyncio.run(beside_a_loop())]
    thread = threading.Thread(target=lambda: found.append(whole_and_state(two)))
    thread.start()
    thread.join()
    assert found == [[6, 22]] * 4


@pytest.mark.parametrize(
    "meet",
    [
        lambda strategy, results, model: [strategy.local_results(result) for result in results],
        lambda strategy, results, model: strategy.local_results(results[-1]),
        lambda strategy, results, model: strategy.reduce("SUM", results[0], axis=None),
        lambda strategy, results, model: model.state_dict(),
        lambda strategy, results, model: model.weight.sum().item(),
        lambda strategy, results, model: [strategy.run(lambda: 1).values for _ in range(3)],
    ],
    ids=["all", "last", "reduce", "state", "variable", "next"],
)
def test_an_error_that_was_caught_is_not_raised_again(two: rd.MirroredStrategy, meet: Callable[..., Any]) -> None:
    with two.scope():
        model = nn.Linear(1, 1)

    def step(fail: bool) -> Any:
        if fail:
            raise KeyError("mine")
        return model(torch.ones(1, 1)).sum()

    two.local_results(two.run(step, args=(False,)))
    results = [two.run(step, args=(number == 0,)) for number in range(4)]
    with pytest.raises((KeyError, rd.CancelledError)):
        meet(two, results, model)
    group = two._launched
    assert group is not None
    group.wait_to_close()  # what closing waits for
    assert two.run(lambda: 1).values == (1, 1)
