"""Damaged files and tampered states: no crash, no error but raydist's, nothing silent under a checksum, little memory.

`make test` tries 100 copies of each kind, `make chaos` 2,000.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.extent import how_many
from tests.hostile.cases import CASES
from tests.hostile.child import STATES
from tests.hostile.runner import attack

COUNT = how_many(100, 2000)


@pytest.mark.timeout(60 + COUNT)
@pytest.mark.parametrize("name", [*CASES, STATES])
def test_mutations(name: str, tmp_path: Path) -> None:
    report = attack(name, COUNT, tmp_path)
    print(f"{name}: {COUNT} copies, {dict(report.counts)}, at most {report.most_memory >> 10} KiB beyond the file")
    assert report.bad == []
    assert sum(report.counts.values()) == COUNT
