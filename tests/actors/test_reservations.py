from __future__ import annotations

from typing import Any

from raydist.actors.reservations import bundle_options, resource_options


def test_resources_with_names_of_their_own_stand_apart() -> None:
    wanted = {"CPU": 0.5, "GPU": 1.0, "memory": 100.0, "TPU": 4.0}
    assert resource_options(wanted) == {"num_cpus": 0.5, "num_gpus": 1.0, "resources": {"TPU": 4.0}}


def test_an_actor_of_a_bundle_takes_nothing_that_it_was_not_given_and_is_not_started_again() -> None:
    group: Any = object()
    options = bundle_options(group, 3, {}, "mine")
    place = options.pop("scheduling_strategy")
    assert (place.placement_group, place.placement_group_bundle_index) == (group, 3)
    assert options == {
        "name": "mine",
        "num_cpus": 0,
        "num_gpus": 0,
        "memory": 0,
        "resources": {},
        "max_restarts": 0,
        "max_task_retries": 0,
    }
