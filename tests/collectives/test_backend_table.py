from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from raydist.collectives.base import Backend, Communicator
from raydist.collectives.hierarchical import HierarchicalBackend
from raydist.collectives.opening import AUTO, BACKENDS, backends_for
from raydist.collectives.process_group import GlooBackend, NcclBackend
from raydist.collectives.shared_memory.communicator import SharedMemoryBackend
from raydist.collectives.xla.communicator import XlaBackend
from raydist.errors import InvalidArgumentError

CPU = torch.device("cpu")


class OtherBackend(Backend):
    """A second one for a device that has one."""

    name = "other"
    devices = ("cpu", "mps")

    def open(self, membership: object, device: object, timeout_s: float) -> Communicator:
        raise NotImplementedError


WITH_OTHER: tuple[type[Backend], ...] = (*BACKENDS, OtherBackend)


def kinds(backends: Sequence[Backend]) -> list[type[Backend]]:
    return [type(backend) for backend in backends]


def test_each_device_has_its_backend() -> None:
    assert kinds(backends_for(CPU)) == [SharedMemoryBackend, HierarchicalBackend, GlooBackend]
    assert kinds(backends_for(torch.device("cuda:1"))) == [NcclBackend]
    assert kinds(backends_for(torch.device("xla:2"))) == [XlaBackend]
    with pytest.raises(InvalidArgumentError, match="one of cpu, cuda, xla, got device mps:0"):
        backends_for(torch.device("mps:0"))


def test_a_second_backend_of_a_device_is_chosen_by_its_name() -> None:
    assert kinds(backends_for(CPU, backends=WITH_OTHER)) == [*kinds(backends_for(CPU)), OtherBackend]
    assert kinds(backends_for(CPU, "other", backends=WITH_OTHER)) == [OtherBackend]
    assert kinds(backends_for(torch.device("mps:0"), backends=WITH_OTHER)) == [OtherBackend]


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    known = ", ".join(f'"{backend.name}"' for backend in BACKENDS)
    with pytest.raises(InvalidArgumentError, match=f"\"auto\" or one of {known}, got 'mpi'"):
        backends_for(CPU, "mpi")


def test_a_backend_that_does_not_serve_the_device() -> None:
    with pytest.raises(InvalidArgumentError, match="with the backend 'nccl' must be on one of cuda, got device cpu"):
        backends_for(CPU, "nccl")


def test_names_are_unique() -> None:
    names = [backend.name for backend in BACKENDS]
    assert len({*names, AUTO}) == len(names) + 1
