"""Damaged files and tampered states: no crash, no error but raydist's, nothing silent under a checksum, little memory.

`make test` tries 30 copies of each kind, `make chaos` 2,000, of checkpoints 10,000.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.chaos.extent import how_many
from tests.hostile.cases import CASES
from tests.hostile.child import STATES
from tests.hostile.runner import Attacker

COUNT = how_many(30, 2000)
MORE = {"checkpoint": how_many(30, 10_000), STATES: how_many(100, 2000)}


@pytest.mark.timeout(60 + (len(CASES) * COUNT + sum(MORE.values())) // 4)
def test_mutations(tmp_path: Path) -> None:
    """One process for all cases: it takes 2 s to start."""
    bad = []
    with contextlib.closing(Attacker(tmp_path)) as attacker:
        for name in (*CASES, STATES):
            count = MORE.get(name, COUNT)
            report = attacker.attack(name, count)
            most = report.most_memory >> 10
            print(f"{name}: {count} copies, {dict(report.counts)}, at most {most} KiB beyond the file")
            bad += [f"{name}: {what}" for what in report.bad]
            assert sum(report.counts.values()) - report.counts["memory"] == count, name
    assert bad == []
