"""Damaged files and tampered states: no crash, no error but raydist's, nothing silent under a checksum, little memory.

`make test` tries 100 copies of each kind, `make chaos` 2,000, of checkpoints 10,000.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.extent import how_many
from tests.hostile.cases import CASES
from tests.hostile.child import STATES
from tests.hostile.runner import Attacker

COUNT = how_many(100, 2000)
MORE = {"checkpoint": how_many(100, 10_000)}


@pytest.fixture(scope="module")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacker]:
    """One process for all cases: it takes 2 s to start."""
    found = Attacker(tmp_path_factory.mktemp("hostile"))
    yield found
    found.close()


@pytest.mark.timeout(60 + max(COUNT, *MORE.values()))
@pytest.mark.parametrize("name", [*CASES, STATES])
def test_mutations(name: str, attacker: Attacker) -> None:
    count = MORE.get(name, COUNT)
    report = attacker.attack(name, count)
    print(f"{name}: {count} copies, {dict(report.counts)}, at most {report.most_memory >> 10} KiB beyond the file")
    assert report.bad == []
    assert sum(report.counts.values()) == count
