"""Every kind of group keeps the contract of communicators: the backends of the table, and the threads of a process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raydist.collectives.opening import BACKENDS
from tests.contracts import communicator as contract

pytestmark = pytest.mark.timeout(180)

KINDS = ["local", *(backend.name for backend in BACKENDS)]


def team_of(request: pytest.FixtureRequest, kind: str) -> contract.Team:
    """The ranks of one kind of group; a backend without any fails with what there is to do."""
    fixture = f"{kind.replace('-', '_')}_team"
    try:
        team: contract.Team = request.getfixturevalue(fixture)
    except pytest.FixtureLookupError:
        pytest.fail(
            f"The table of backends names {kind!r}, but nobody checks it: add a fixture `{fixture}` to "
            "tests/collectives/conftest.py that gives a tests.contracts.communicator.Team of its ranks.",
            pytrace=False,
        )
    return team


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("kind", KINDS)
def test_contract(request: pytest.FixtureRequest, kind: str, check: Callable[[contract.Team], None]) -> None:
    check(team_of(request, kind))
