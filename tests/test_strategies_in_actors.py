"""A strategy in an actor, as in a trial of Ray Tune: it uses the actor's placement group and runtime environment."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import raydist as rd
from raydist.cluster.reservation import assign

SMALL = {"CPU": 0.01}


class Trial:
    """An actor that runs a function, which may make strategies."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


@contextmanager
def trial_in_group(num_bundles: int, *, captures: bool = True) -> Iterator[Any]:
    group = placement_group([SMALL] * num_bundles)
    placed = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=captures)
    trial: Any = ray.remote(Trial).options(num_cpus=0.01, scheduling_strategy=placed).remote()
    try:
        yield trial
    finally:
        ray.kill(trial)
        remove_placement_group(group)


def start_replicas(num_replicas: int) -> None:
    timeouts = rd.Timeouts(start_s=1.0)
    with rd.MirroredStrategy(num_replicas, resources_per_replica=SMALL, timeouts=timeouts) as strategy:
        strategy.run(lambda: None)


def sum_and_num_groups(num_replicas: int) -> tuple[float, int]:
    with rd.MirroredStrategy(num_replicas, resources_per_replica=SMALL) as strategy:
        batches = strategy.distribute_dataset(rd.Dataset.range(8).batch(8))
        totals = [strategy.reduce("SUM", strategy.run(lambda batch: batch.sum(), args=(batch,))) for batch in batches]
        created = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
        return float(totals[0]), len(created)


def add_on_workers() -> float:
    with rd.ParameterServerStrategy(1, 1, resources_per_replica=SMALL, resources_per_server=SMALL) as strategy:
        value = strategy.run(lambda: 1.5)
        return float(strategy.reduce("SUM", value, axis=None))


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_replicas_are_in_the_group_that_captures_the_children_of_their_actor(ray_cluster: None) -> None:
    others = sum(group["state"] == "CREATED" for group in placement_group_table().values())
    with trial_in_group(3) as trial:
        for _ in range(2):  # a closed strategy leaves the group and its room to the next one
            assert ray.get(trial.run.remote(sum_and_num_groups, 2), timeout=120) == (28.0, others + 1)
        assert ray.get(trial.run.remote(add_on_workers), timeout=120) == 1.5
        with pytest.raises(rd.DeadlineExceededError, match="must have free room for 3 replicas"):
            ray.get(trial.run.remote(start_replicas, 3), timeout=120)
        with pytest.raises(rd.FailedPreconditionError, match="but it is too small"):
            ray.get(trial.run.remote(start_replicas, 4), timeout=120)
    with trial_in_group(1, captures=False) as trial:
        assert ray.get(trial.run.remote(sum_and_num_groups, 2), timeout=120) == (28.0, others + 2)


@pytest.mark.parametrize(
    ("strategy", "hosts", "expected"),
    [
        ("STRICT_PACK", ["a", "b", "b"], (1, 2)),
        ("STRICT_SPREAD", ["a", "a", "b"], (0, 2)),
        ("STRICT_SPREAD", ["a", "a", "a"], None),
        ("SPREAD", ["a", "a", "b"], (0, 1)),
    ],
)
def test_bundles_are_chosen_as_the_placement_strategy_says(
    strategy: str, hosts: list[str], expected: tuple[int, ...] | None
) -> None:
    assert assign([SMALL, SMALL], [SMALL] * 3, hosts, strategy) == expected
    assert assign([SMALL, {"GPU": 1.0}], [SMALL] * 3, hosts, strategy) is None


def words_of_package(num_workers: int) -> tuple[list[str], list[str]]:
    """The package's word and a variable, as replicas and input workers see them."""

    def word(_: Any = 0) -> str:
        return f"{importlib.import_module('package_of_the_trial').WORD} {os.environ['OF_THE_TRIAL']}"

    with rd.MirroredStrategy(2, resources_per_replica=SMALL) as strategy:
        replicas = [str(value) for value in strategy.local_results(strategy.run(word))]
        dataset = rd.Dataset.range(2).map(word).batch(2)
        batches = strategy.distribute_dataset(dataset, rd.InputOptions(num_input_workers=num_workers))
        workers = [str(text) for batch in batches for part in strategy.local_results(batch) for text in part]
    return replicas, workers


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_replicas_and_input_workers_have_the_runtime_environment(ray_cluster: None, tmp_path: Path) -> None:
    package = tmp_path / "package_of_the_trial"
    package.mkdir()
    (package / "__init__.py").write_text("WORD = 'hello'\n")
    environment = {"env_vars": {"PYTHONPATH": str(tmp_path), "OF_THE_TRIAL": "there"}}
    trial: Any = ray.remote(Trial).options(num_cpus=0.01, runtime_env=environment).remote()
    try:
        for num_workers in (0, 1):
            words = ray.get(trial.run.remote(words_of_package, num_workers), timeout=120)
            assert words == (["hello there"] * 2, ["hello there"] * 2)
    finally:
        ray.kill(trial)
