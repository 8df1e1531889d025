"""The limit is tried in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raydist.actors.workers.memory_limit import limit_memory

CODE = """
import numpy as np
from raydist.actors.workers.memory_limit import limit_memory

print(limit_memory({limit}))
np.ones(20 << 20, np.uint8)
try:
    np.ones(1 << 44, np.uint8)
except MemoryError as error:
    print(type(error).__mro__[1].__name__)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits what a process has mapped for itself")
@pytest.mark.parametrize("limit", [200 << 20, None])
def test_a_process_cannot_take_more(limit: int | None) -> None:
    done = subprocess.run([sys.executable, "-c", CODE.format(limit=limit)], capture_output=True, text=True, timeout=50)
    room, error = done.stdout.split()
    assert int(room) == limit if limit else int(room) > 20 << 20
    assert error == "MemoryError", done.stderr


def test_other_systems_have_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert limit_memory(1) is None
