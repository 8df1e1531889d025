from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed

from tests.collectives.processes import ProcessTeam
from tests.contracts import communicator as contract

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def team() -> Iterator[ProcessTeam]:
    with ProcessTeam(3, timeout_s=2.0) as team:
        yield team


@pytest.mark.parametrize(
    "check",
    [
        contract.check_reductions,
        contract.check_moves,
        contract.check_tensor_kinds,
        contract.check_asynchronous,
        contract.check_refusals,
        contract.check_short_limit,
        contract.check_hard_limit,
        contract.check_abort,
        contract.check_death,
    ],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_contract(team: ProcessTeam, check: Callable[[contract.Team], None]) -> None:
    check(team)
