"""Every example runs. What they reach with all their steps is measured by `make demo`, not here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.ray_head import ray_home

ROOT = Path(__file__).parent.parent
SCRIPTS = {path.name for path in (ROOT / "examples").glob("*.py")} - {"digits_common.py"}


def run_example(*arguments: str, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT / "examples", env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def results_in(output: str) -> tuple[float, str]:
    """(accuracy, fingerprint of the parameters) of what an example printed."""
    accuracy = re.search(r"^test accuracy: (\d\.\d{3})$", output, flags=re.MULTILINE)
    parameters = re.search(r"^parameters: (\w{16})$", output, flags=re.MULTILINE)
    assert accuracy, output
    assert parameters, output
    return float(accuracy[1]), parameters[1]


@pytest.mark.parametrize("script", ["digits_raydist.py", "digits_fit.py"])
def test_runs_on_one_device(script: str) -> None:
    accuracy, _ = results_in(run_example(script, "--strategy", "one_device", "--smoke"))
    assert 0 <= accuracy <= 1


@pytest.mark.parametrize("script", ["digits_raydist.py", "digits_fit.py"])
def test_unknown_strategy(script: str) -> None:
    command = [sys.executable, script, "--strategy", "quantum"]
    done = subprocess.run(command, cwd=ROOT / "examples", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'quantum' (choose from 'one_device', 'mirrored')" in done.stderr


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_own_loop_runs_on_replicas() -> None:
    with ray_home() as home:
        environment = dict(home.environment)
        output = run_example("digits_raydist.py", "--replicas", "2", "--smoke", environment=environment)
    assert results_in(output)[0] <= 1


@pytest.mark.timeout(120)
def test_plain_pytorch_learns_digits() -> None:
    accuracy, _ = results_in(run_example("digits_torch.py", "--epochs", "4"))
    assert accuracy >= 0.9


def test_takes_images_of_a_file(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 256, (60, 12, 16), dtype=np.uint8), draw.integers(0, 10, 60, dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=labels)
    file = str(tmp_path / "images.npz")
    of_torch = results_in(run_example("digits_torch.py", "--data", file, "--smoke"))
    assert of_torch == results_in(run_example("digits_torch.py", "--data", file, "--smoke"))


def test_every_example_is_tested() -> None:
    tested = (ROOT / "tests" / "test_examples.py").read_text() + (ROOT / "tests" / "test_ways_in.py").read_text()
    assert {script for script in SCRIPTS if script not in tested} == set()
