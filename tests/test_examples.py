"""Every example runs. What they reach with all their steps is measured by `make demo`, not here."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import raydist as rd
from tests.shared_scripts import Scripts
from tests.watched_program import run_program

ROOT = Path(__file__).parent.parent
PARTS = {"digits_common.py", "chosen_strategy.py", "click_data.py", "training_loop.py"}
SCRIPTS = {path.name for path in (ROOT / "examples").glob("*.py")} - PARTS
STRATEGIES = runpy.run_path(str(ROOT / "examples" / "chosen_strategy.py"))["STRATEGIES"]
NO_CHOICE = {"Strategy", "OneNodeStrategy"}  # bases for strategies of one's own


def results_in(output: str) -> tuple[float, str]:
    """(accuracy, fingerprint of the parameters) of what an example printed."""
    accuracy = re.search(r"^test accuracy: (\d\.\d{3})$", output, flags=re.MULTILINE)
    parameters = re.search(r"^parameters: (\w{16})$", output, flags=re.MULTILINE)
    assert accuracy, output
    assert parameters, output
    return float(accuracy[1]), parameters[1]


@pytest.mark.parametrize("script", ["digits_raydist.py", "digits_fit.py"])
def test_runs_on_one_device(script: str, scripts: Scripts) -> None:
    accuracy, _ = results_in(scripts.run(script, "--strategy", "one_device", "--smoke"))
    assert 0 <= accuracy <= 1


@pytest.mark.timeout(180)
@pytest.mark.parametrize("script", ["digits_fit.py", "char_transformer.py"])
def test_goes_on_where_it_was_and_shows_its_curves(script: str, tmp_path: Path, scripts: Scripts) -> None:
    folders = ("--checkpoint", str(tmp_path / "run"), "--tensorboard", str(tmp_path / "logs"))
    resume = ("--resume",) if script == "digits_fit.py" else ()
    flags = ("--strategy", "one_device", "--smoke", *folders, *resume)
    output = scripts.run(script, *flags) + scripts.run(script, *flags)
    assert len(list((tmp_path / "logs").rglob("events.out.*"))) > 1
    found = re.findall(r"^(?:parameters|bits per character): (\S+)", output, re.MULTILINE)
    assert (len(found), len(set(found))) == (2, 1), "nothing was left for the second one to train"
    assert len(re.findall(r"^epoch \d|^Epoch \d", output, re.MULTILINE)) == (1 if resume else 2)


@pytest.mark.timeout(180)
def test_the_notebook_leads_from_data_to_curves(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples" / "from_data_to_curves.ipynb").read_text())["cells"]
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code"), "clear the outputs"
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    command = [sys.executable, str(script)]
    output = run_program(command, folder=ROOT / "examples", environment={**os.environ, "TMPDIR": str(tmp_path)})
    assert "6 epochs in the history" in output
    accuracies = re.findall(r"^val_multiclass_accuracy +(.*)$", output, re.MULTILINE)
    assert float(accuracies[0].split()[-1]) > 0.5


def test_unknown_strategy(scripts: Scripts) -> None:
    script = "digits_fit.py"
    said = scripts.run(script, "--strategy", "quantum", status=2)
    choices = ", ".join(map(repr, STRATEGIES))
    assert f"{script}: error: argument --strategy: invalid choice: 'quantum' (choose from {choices})" in said


def test_every_strategy_of_raydist_is_a_choice() -> None:
    named = {name for name in rd.__all__ if name.endswith("Strategy")} - NO_CHOICE
    makers = (ROOT / "examples" / "chosen_strategy.py").read_text()
    assert named == set(re.findall(r"rd\.(\w+Strategy)\(", makers))
    assert len(named) == len(STRATEGIES)


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_a_strategy_of_ones_own_averages_parameters(scripts: Scripts) -> None:
    outputs = [scripts.run("local_sgd.py", "--every", every) for every in ("1", "4")]
    (apart, from_one), (apart_4, from_one_4) = (
        [float(found) for found in re.findall(r"^\D*: (\S+)$", output, flags=re.MULTILINE)] for output in outputs
    )
    assert apart == apart_4 == 0.0, "the last batch is one after which they average"
    assert from_one < 1e-12, "averages after every batch are those of gradients"
    assert 1e-6 < from_one_4 < 0.1


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_a_strategy_of_ones_own_keeps_what_a_strategy_promises(scripts: Scripts) -> None:
    assert "it keeps" in scripts.run("local_sgd.py", "--check")


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_own_loop_runs_on_replicas(scripts: Scripts) -> None:
    assert results_in(scripts.run("digits_raydist.py", "--replicas", "2", "--smoke"))[0] <= 1


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_every_synchronous_strategy_trains_the_same_model(scripts: Scripts) -> None:
    """One program, one flag: on two replicas of one thread, all end with the same bits."""
    names = sorted(STRATEGIES.keys() - {"one_device", "tpu", "parameter_server"})
    outputs = [scripts.run("digits_fit.py", "--strategy", name, "--replicas", "2", "--smoke") for name in names]
    assert all(re.search(r"^\w+Strategy: ", output, flags=re.MULTILINE) for output in outputs)
    assert len({results_in(output) for output in outputs}) == 1, outputs


TABLES_AND_TEXT = {
    "wide_and_deep.py": r"^test loss: (\d\.\d+)$",
    "matrix_factorisation.py": r"^test error: (\d\.\d+) stars",
    "char_lstm.py": r"^bits per character: (\d\.\d+) ",
}
"""Examples whose workers need not wait for each other, and what they print."""


@pytest.mark.ray
@pytest.mark.timeout(120)
@pytest.mark.parametrize("script", TABLES_AND_TEXT)
def test_tables_and_text_on_parameter_servers(script: str, scripts: Scripts) -> None:
    output = scripts.run(script, "--strategy", "parameter_server", "--smoke")
    found = re.search(TABLES_AND_TEXT[script], output, re.MULTILINE)
    assert found, output
    assert 0 < float(found[1]) < 6


def test_tables_are_read_in_their_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    read = runpy.run_path(str(ROOT / "examples" / "click_data.py"))["read_table"]
    census = ["5" if place in (0, 1, 6, 17, 18, 19, 25, 31, 40) else "Private" for place in range(42)] + ["50000+."]
    clicks = ["1", *map(str, range(13)), *("68fd1e64", "") * 13]
    (tmp_path / "census.csv").write_text("\n".join([", ".join(census)] * 2))
    (tmp_path / "clicks.txt").write_text("\n".join(["\t".join(clicks)] * 3))
    for name, numbers, words, rows in (("census.csv", 7, 33, 2), ("clicks.txt", 13, 26, 3)):
        table = read(tmp_path / name)
        assert (table.numbers.shape, table.words.shape) == ((rows, numbers), (rows, words))
        assert table.targets.tolist() == [1.0] * rows
        assert (table.words // 1_000_000 == np.arange(words)).all()


@pytest.mark.timeout(120)
def test_plain_pytorch_learns_digits(scripts: Scripts) -> None:
    accuracy, _ = results_in(scripts.run("digits_torch.py", "--epochs", "4"))
    assert accuracy >= 0.9


def test_an_example_says_which_package_is_missing() -> None:
    script = str(ROOT / "examples" / "finetune_text.py")
    hidden = (
        "import runpy, sys; sys.modules['transformers'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    command = [sys.executable, "-c", hidden, script]
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (
        1,
        "This example needs transformers: pip install transformers",
    )


def test_takes_images_of_a_file(tmp_path: Path, scripts: Scripts) -> None:
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 256, (60, 12, 16), dtype=np.uint8), draw.integers(0, 10, 60, dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=labels)
    file = str(tmp_path / "images.npz")
    of_torch = results_in(scripts.run("digits_torch.py", "--data", file, "--smoke"))
    assert of_torch == results_in(scripts.run("digits_torch.py", "--data", file, "--smoke"))


def test_every_example_is_tested() -> None:
    files = ("test_examples.py", "test_ways_in.py", "hub/test_finetune_text.py")
    tested = "".join((ROOT / "tests" / file).read_text() for file in files)
    assert {script for script in SCRIPTS if script not in tested} == set()
