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
from raydist.cluster.reservation import assign, on_node

SMALL = {"CPU": 0.01}


class Trial:
    """An actor that runs a function, which may make strategies."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


@contextmanager
def trial_in_group(num_bundles: int, *, captures: bool = True, **variables: str) -> Iterator[Any]:
    group = placement_group([SMALL] * num_bundles)
    placed = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=captures)
    environment = {"env_vars": variables}
    trial: Any = ray.remote(Trial).options(num_cpus=0.01, scheduling_strategy=placed, runtime_env=environment).remote()
    try:
        yield trial
    finally:
        ray.kill(trial)
        remove_placement_group(group)


def start_replicas(num_replicas: int) -> None:
    timeouts = rd.Timeouts(start_s=1.0)
    with rd.MirroredStrategy(num_replicas, resources_per_replica=SMALL, timeouts=timeouts) as strategy:
        strategy.run(lambda: None)


def num_groups() -> int:
    return sum(group["state"] == "CREATED" for group in placement_group_table().values())


def word(_: Any = 0) -> str:
    """The package's word and a variable, as this process sees them."""
    return f"{importlib.import_module('package_of_the_trial').WORD} {os.environ['OF_THE_TRIAL']}"


def words_and_num_groups(num_replicas: int) -> tuple[list[str], list[str], int]:
    """The words of replicas and of input workers, and how many placement groups there are meanwhile."""
    with rd.MirroredStrategy(num_replicas, resources_per_replica=SMALL) as strategy:
        replicas = [str(value) for value in strategy.local_results(strategy.run(word))]
        dataset = rd.Dataset.range(2).map(word).batch(2)
        batches = strategy.distribute_dataset(dataset, rd.InputOptions(num_input_workers=1))
        workers = [str(text) for batch in batches for part in strategy.local_results(batch) for text in part]
        return replicas, workers, num_groups()


def own_group(_: Any = 0) -> str:
    return str(ray.get_runtime_context().get_placement_group_id())


def groups_with_input_worker(resources: dict[str, float]) -> tuple[str, set[str]]:
    """The placement group of this process, and that of an input worker with resources of its own."""
    options = rd.InputOptions(num_input_workers=1, resources_per_input_worker=resources)
    with rd.MirroredStrategy(2, resources_per_replica=SMALL) as strategy:
        batches = strategy.distribute_dataset(rd.Dataset.range(2).map(own_group).batch(2), options)
        found = {str(group) for batch in batches for part in strategy.local_results(batch) for group in part}
    return own_group(), found


def nodes_for_actors() -> tuple[str, str]:
    """The nodes of an actor that is wanted on this node, and on one where the group has no bundle."""
    return on_node(ray.get_runtime_context().get_node_id())[0], on_node("e" * 56)[0]


def num_groups_of_one_replica() -> int:
    with rd.MirroredStrategy(1, resources_per_replica=SMALL) as strategy:
        strategy.run(lambda: None)
        return num_groups()


def add_on_workers() -> float:
    with rd.ParameterServerStrategy(1, 1, resources_per_replica=SMALL, resources_per_server=SMALL) as strategy:
        value = strategy.run(lambda: 1.5)
        return float(strategy.reduce("SUM", value, axis=None))


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.long
def test_replicas_are_in_the_group_and_the_environment_of_their_actor(ray_cluster: None, tmp_path: Path) -> None:
    package = tmp_path / "package_of_the_trial"
    package.mkdir()
    (package / "__init__.py").write_text("WORD = 'hello'\n")
    others = num_groups()
    with trial_in_group(3, PYTHONPATH=str(tmp_path), OF_THE_TRIAL="there") as trial:
        found = ray.get(trial.run.remote(words_and_num_groups, 2), timeout=120)
        assert found == (["hello there"] * 2, ["hello there"] * 2, others + 1)
        # A closed strategy leaves the group and its room to the next one.
        assert ray.get(trial.run.remote(add_on_workers), timeout=120) == 1.5
        with pytest.raises(rd.DeadlineExceededError, match="must have free room for 3 replicas"):
            ray.get(trial.run.remote(start_replicas, 3), timeout=120)
        with pytest.raises(rd.FailedPreconditionError, match="but it is too small"):
            ray.get(trial.run.remote(start_replicas, 4), timeout=120)
    with trial_in_group(1, captures=False) as trial:
        assert ray.get(trial.run.remote(num_groups_of_one_replica), timeout=120) == others + 2


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.long
def test_input_workers_with_resources_are_in_the_group_of_the_actor(ray_cluster: None) -> None:
    with trial_in_group(4) as trial:
        own, found = ray.get(trial.run.remote(groups_with_input_worker, SMALL), timeout=120)
        assert found == {own} != {"None"}
        with pytest.raises(rd.FailedPreconditionError, match="must fit in a bundle of the placement group"):
            ray.get(trial.run.remote(groups_with_input_worker, {"CPU": 1.0}), timeout=120)
        here, elsewhere = ray.get(trial.run.remote(nodes_for_actors), timeout=120)
        assert here == elsewhere == ray.get_runtime_context().get_node_id()
    with trial_in_group(1, captures=False) as trial:
        own, found = ray.get(trial.run.remote(groups_with_input_worker, {"CPU": 1.0}), timeout=120)
        assert own not in found
        assert ray.get(trial.run.remote(nodes_for_actors), timeout=120) == (here, "e" * 56)


def test_bundles_are_chosen_as_the_placement_strategy_says() -> None:
    for strategy, hosts, expected in [
        ("STRICT_PACK", ["a", "b", "b"], (1, 2)),
        ("STRICT_SPREAD", ["a", "a", "b"], (0, 2)),
        ("STRICT_SPREAD", ["a", "a", "a"], None),
        ("SPREAD", ["a", "a", "b"], (0, 1)),
    ]:
        assert assign([SMALL, SMALL], [SMALL] * 3, hosts, strategy) == expected, strategy
        assert assign([SMALL, {"GPU": 1.0}], [SMALL] * 3, hosts, strategy) is None, strategy
