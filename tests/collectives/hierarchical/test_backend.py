from __future__ import annotations

import pytest
import torch

from raydist.collectives.base import Membership
from raydist.collectives.hierarchical.backend import HierarchicalBackend
from raydist.collectives.hierarchical.communicator import HierarchicalCommunicator
from raydist.collectives.shared_memory.communicator import SharedMemoryCommunicator

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("hosts", "kind"), [(("a", "a"), SharedMemoryCommunicator), (("a", "b"), HierarchicalCommunicator)]
)
def test_one_host_is_shared_memory(hosts: tuple[str, ...], kind: type) -> None:
    membership = Membership("g", 0, 0, 2, hosts=hosts)
    assert HierarchicalBackend().declines(membership) is None
    assert type(HierarchicalBackend().communicator(membership, CPU, 1.0)) is kind


def test_who_knows_no_hosts_needs_another() -> None:
    assert "one host" in str(HierarchicalBackend().declines(Membership("g", 0, 0, 2)))
