from __future__ import annotations

import subprocess
import sys

from raydist.dataset import Dataset


def test_to_torch_is_a_torch_dataset() -> None:
    assert [int(x) for x in Dataset.range(3).to_torch()] == [0, 1, 2]


def test_exporting_loads_ray_only_when_it_is_asked_for() -> None:
    code = "import sys; from raydist.dataset.exporting import Exporting; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
