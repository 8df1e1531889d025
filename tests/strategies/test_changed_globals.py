"""Globals that the driver changes between runs reach the replicas, as on one device (I1)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import raydist as rd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

SCALE = 1.0
TABLE = {"offset": 0.0}


def scaled(value: float) -> float:
    return value * SCALE


def read(strategy: rd.Strategy, step: Any) -> float:
    first, second = strategy.local_results(strategy.run(step))
    assert first == second
    return float(first)


def test_globals_of_a_step_and_of_its_helper(two: rd.MirroredStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    with two.scope():
        weight = torch.nn.Parameter(torch.tensor(2.0))

    def step() -> float:
        return scaled(weight.item()) + SCALE + TABLE["offset"]

    def helper(value: float) -> float:
        return scaled(value)

    def enclosing(factor: float = 1.0) -> float:
        return helper(weight.item()) * factor

    assert (read(two, step), read(two, enclosing)) == (3.0, 2.0)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert (read(two, step), read(two, enclosing)) == (9.0, 6.0)
    monkeypatch.setitem(TABLE, "offset", 1.0)
    assert read(two, step) == 10.0
    enclosing.__defaults__ = (2.0,)
    assert read(two, enclosing) == 12.0


MODULE = """
import threading
SCALE = 1.0
COUNT = 0
LOCK = threading.Lock()

def scaled(value):
    return value * SCALE

def twice_removed(value):
    return scaled(value)

def bump():
    global COUNT
    with LOCK:
        COUNT += 1

def current():
    return COUNT
"""

PROGRAM = """
import raydist as rd
import torch
import helpers

SCALE = 1.0

def scaled(value):
    return value * SCALE

def step():
    return scaled(weight.item()), helpers.twice_removed(weight.item()), removed(weight.item())

def count():
    helpers.bump()
    return helpers.current()

if __name__ == "__main__":
    from helpers import twice_removed as removed
    helpers.SCALE = 2.0  # before the first run
    with rd.MirroredStrategy(2) as strategy:
        with strategy.scope():
            weight = torch.nn.Parameter(torch.tensor(2.0))
        print(strategy.local_results(strategy.run(step))[1])
        SCALE = helpers.SCALE = 3.0
        print(strategy.local_results(strategy.run(step))[1])
        strategy.run(count)
        print(strategy.local_results(strategy.run(count))[1])
"""


def test_globals_of_the_program_and_of_a_module_beside_it(tmp_path: Any) -> None:
    (tmp_path / "helpers.py").write_text(MODULE)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.splitlines() == ["(2.0, 4.0, 4.0)", "(6.0, 6.0, 6.0)", "2"], done.stderr
