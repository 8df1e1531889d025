"""The example with a model of transformers: by a loop and by `fit`, saved, and continued from the saved directory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.shared_scripts import Scripts

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

SCRIPT = "finetune_text.py"


def loss_in(output: str) -> float:
    found = re.search(r"^loss of a hidden character: (\d+\.\d+)$", output, re.MULTILINE)
    assert found, output
    return float(found[1])


def test_the_loop_and_fit_train_the_same_model(scripts: Scripts, tmp_path: Path) -> None:
    saved = str(tmp_path / "bert")
    loop = loss_in(scripts.run(SCRIPT, "--smoke", "--replicas", "2", "--save", saved))
    fitted = loss_in(scripts.run(SCRIPT, "--smoke", "--replicas", "2", "--fit"))
    assert fitted == pytest.approx(loop, abs=2e-4)  # they print four digits
    assert loss_in(scripts.run(SCRIPT, "--smoke", "--strategy", "one_device", "--model", saved)) < loop
