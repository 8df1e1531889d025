"""The ranks of each kind of group: a fixture `<backend>_team` for every backend of the table, on which its contract is
checked. Each lives as long as this folder's tests: starting interpreters that import torch takes most of the time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.collectives.processes import ProcessTeam
from tests.collectives.threads import ThreadTeam
from tests.contracts.communicator import Team
from tests.xla_world import IS_REAL, XlaTeam, chips_here

NUM_RANKS = 3


@pytest.fixture(scope="package")
def local_team() -> Team:
    return ThreadTeam(NUM_RANKS, timeout_s=2.0)


@pytest.fixture(scope="package")
def gloo_team() -> Iterator[ProcessTeam]:
    with ProcessTeam(NUM_RANKS, timeout_s=2.0, backend="gloo") as team:
        yield team


@pytest.fixture(scope="package")
def shm_team() -> Iterator[ProcessTeam]:
    with ProcessTeam(NUM_RANKS, timeout_s=2.0, backend="shm") as team:
        yield team


@pytest.fixture(scope="package")
def hierarchical_team() -> Iterator[ProcessTeam]:
    """Two hosts, of two ranks and of one."""
    with ProcessTeam(NUM_RANKS, timeout_s=2.0, backend="hierarchical", hosts=("a", "b", "a")) as team:
        yield team


@pytest.fixture(scope="package")
def nccl_team() -> Iterator[ProcessTeam]:
    if torch.cuda.device_count() < NUM_RANKS:
        pytest.skip(f"needs {NUM_RANKS} CUDA devices, one a rank, and there are {torch.cuda.device_count()}")
    with ProcessTeam(NUM_RANKS, timeout_s=10.0, backend="nccl", device="cuda") as team:
        yield team


@pytest.fixture(scope="package")
def xla_team() -> Iterator[XlaTeam]:
    with chips_here(NUM_RANKS):
        team = XlaTeam(NUM_RANKS, timeout_s=5.0 if IS_REAL else 2.0)
        yield team
        team.close()
