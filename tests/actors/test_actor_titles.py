from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ray._private.state import state
from ray.core.generated import gcs_pb2

import raydist as rd
from raydist.actors.supervision import spoken_title, title_of_this_actor


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("central-storage-0a1b2c3d-replica-12", "replica 12 of central-storage-0a1b2c3d"),
        ("parameter-server-0a1b2c3d-worker-1", "worker 1 of parameter-server-0a1b2c3d"),
        ("parameter-server-0a1b2c3d-server-0", "parameter server 0 of parameter-server-0a1b2c3d"),
        ("mirrored-0a1b2c3d-input-12345678", "input pipeline of mirrored-0a1b2c3d"),
        ("raydist-input-worker-3", "input worker 3"),
        ("somebody", "somebody"),
        ("", ""),
    ],
)
def test_names_as_a_person_says_them(name: str, title: str) -> None:
    assert spoken_title(name) == title


def test_outside_of_actors_there_is_none() -> None:
    assert title_of_this_actor() == ""


@pytest.mark.ray
def test_ray_shows_who_is_who(mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    strategy = mirrored(2)
    group = strategy._launched
    assert group is not None
    table = state._connect_and_get_accessor().get_actor_table(None, None)
    message: Any = vars(gcs_pb2)["ActorTableData"]  # its stub does not list it
    shown = {message.FromString(entry).repr_name for entry in table}
    name = group._setups[0].name
    assert {f"replica {rank} of {name}" for rank in range(2)} <= shown
    assert f"input pipeline of {name}" in shown
