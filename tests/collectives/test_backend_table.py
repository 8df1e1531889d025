from __future__ import annotations

import pytest
import torch

from raydist.collectives.backend import Backend
from raydist.collectives.backend_table import AUTO, BACKENDS, backend_for
from raydist.collectives.gloo import GlooBackend
from raydist.collectives.nccl import NcclBackend
from raydist.errors import InvalidArgumentError

CPU = torch.device("cpu")


class OtherBackend(Backend):
    """A second one for a device that has one."""

    name = "other"
    devices = ("cpu", "xla")

    def create(self, store: object, membership: object, timeout_s: float) -> None:
        raise NotImplementedError

    collective = point_to_point = kill = create  # type: ignore[assignment]  # none of them is called


WITH_OTHER: tuple[type[Backend], ...] = (*BACKENDS, OtherBackend)


def test_each_device_has_its_backend() -> None:
    assert isinstance(backend_for(CPU), GlooBackend)
    assert isinstance(backend_for(torch.device("cuda:1")), NcclBackend)
    with pytest.raises(InvalidArgumentError, match="one of cpu, cuda, got device xla:0"):
        backend_for(torch.device("xla:0"))


def test_a_second_backend_of_a_device_is_chosen_by_its_name() -> None:
    assert isinstance(backend_for(CPU, backends=WITH_OTHER), GlooBackend)
    assert isinstance(backend_for(CPU, "other", backends=WITH_OTHER), OtherBackend)
    assert isinstance(backend_for(torch.device("xla:0"), backends=WITH_OTHER), OtherBackend)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    known = ", ".join(f'"{backend.name}"' for backend in BACKENDS)
    with pytest.raises(InvalidArgumentError, match=f"\"auto\" or one of {known}, got 'mpi'"):
        backend_for(CPU, "mpi")


def test_a_backend_that_does_not_serve_the_device() -> None:
    with pytest.raises(InvalidArgumentError, match="with the backend 'nccl' must be on one of cuda, got device cpu"):
        backend_for(CPU, "nccl")


def test_names_are_unique() -> None:
    names = [backend.name for backend in BACKENDS]
    assert len({*names, AUTO}) == len(names) + 1
