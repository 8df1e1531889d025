from __future__ import annotations

import torch

from raydist.collectives.base import Membership
from raydist.collectives.shared_memory.backend import SharedMemoryBackend
from raydist.collectives.shared_memory.communicator import SharedMemoryCommunicator


def test_it_makes_a_communicator_that_has_started_nothing() -> None:
    membership = Membership("g", 0, 0, 2, "nowhere", 1)
    communicator = SharedMemoryBackend().communicator(membership, torch.device("cpu"), 1.0)
    assert isinstance(communicator, SharedMemoryCommunicator)
    communicator.abort()
    communicator.close()
