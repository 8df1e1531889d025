"""Every example runs. What they reach with all their steps is measured by `make demo`, not here."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

import raydist as rd
from tests.datasets.image_files import write_idx
from tests.ray_head import free_ports
from tests.shared_scripts import EXAMPLES, Scripts

PARTS = {"digits_common.py", "chosen_strategy.py", "click_data.py", "training_loop.py", "transformer_common.py"}
SCRIPTS = {path.name for path in EXAMPLES.glob("*.py")} - PARTS
STRATEGIES = runpy.run_path(str(EXAMPLES / "chosen_strategy.py"))["STRATEGIES"]
NO_CHOICE = {"Strategy", "OneNodeStrategy", "PipelineStrategy"}  # two bases; pipelines have steps of their own

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def results_in(output: str) -> tuple[float, str]:
    """(accuracy, fingerprint of the parameters) of what an example printed."""
    accuracy = re.search(r"^test accuracy: (\d\.\d{3})$", output, flags=re.MULTILINE)
    parameters = re.search(r"^parameters: (\w{16})$", output, flags=re.MULTILINE)
    assert accuracy, output
    assert parameters, output
    return float(accuracy[1]), parameters[1]


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


def test_the_notebook_leads_from_data_to_curves(tmp_path: Path, scripts: Scripts) -> None:
    cells = json.loads((EXAMPLES / "from_data_to_curves.ipynb").read_text())["cells"]
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code"), "clear the outputs"
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    script = tmp_path / "cells.py"
    script.write_text(f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}\n{code}\n\ntempfile.tempdir = None\n")
    output = scripts.run(script)
    assert "6 epochs in the history" in output
    accuracies = re.findall(r"^val_multiclass_accuracy +(.*)$", output, re.MULTILINE)
    assert float(accuracies[0].split()[-1]) > 0.5


def test_every_strategy_of_raydist_is_a_choice_and_no_other(scripts: Scripts) -> None:
    named = {name for name in rd.__all__ if name.endswith("Strategy")} - NO_CHOICE
    assert named == set(re.findall(r"rd\.(\w+Strategy)\(", (EXAMPLES / "chosen_strategy.py").read_text()))
    assert len(named) == len(STRATEGIES)
    said = scripts.run("digits_fit.py", "--strategy", "quantum", status=2)
    choices = ", ".join(map(repr, STRATEGIES))
    assert f"digits_fit.py: error: argument --strategy: invalid choice: 'quantum' (choose from {choices})" in said


def distances_in(output: str) -> list[float]:
    """Between replicas, and from one device."""
    return [float(found) for found in re.findall(r"^\D*: (\S+)$", output, flags=re.MULTILINE)]


def test_a_strategy_of_ones_own_averages_parameters(scripts: Scripts) -> None:
    apart, from_one = distances_in(scripts.run("local_sgd.py", "--every", "4"))
    assert apart == 0.0, "the last batch is one after which they average"
    assert 1e-6 < from_one < 0.1


@pytest.mark.long
def test_a_strategy_of_ones_own_keeps_what_a_strategy_promises(scripts: Scripts) -> None:
    apart, from_one = distances_in(scripts.run("local_sgd.py", "--every", "1"))
    assert apart == 0.0
    assert from_one < 1e-12, "averages after every batch are those of gradients"
    assert "it keeps" in scripts.run("local_sgd.py", "--check")


def test_fit_and_a_loop_of_ones_own_run_on_replicas(scripts: Scripts) -> None:
    fitted = scripts.run("digits_fit.py", "--strategy", "mirrored", "--smoke")
    assert re.search(r"^MirroredStrategy: .*, ", fitted, flags=re.MULTILINE)
    assert results_in(fitted) == results_in(scripts.run("digits_raydist.py", "--replicas", "2", "--smoke"))


@pytest.mark.long
def test_every_synchronous_strategy_trains_the_same_model(scripts: Scripts) -> None:
    """One program, one flag: on two replicas of one thread, all end with the same bits."""
    names = sorted(STRATEGIES.keys() - {"one_device", "tpu", "parameter_server", "sharded", "mesh"})
    outputs = [scripts.run("digits_fit.py", "--strategy", name, "--replicas", "2", "--smoke") for name in names]
    assert all(re.search(r"^\w+Strategy: ", output, flags=re.MULTILINE) for output in outputs)
    assert len({results_in(output) for output in outputs}) == 1, outputs


def test_a_language_model_is_divided_among_replicas(tmp_path: Path, scripts: Scripts) -> None:
    flags = ("--smoke", "--checkpoint", str(tmp_path))
    output = scripts.run("transformer_sharded.py", *flags)
    found = re.search(r"^epoch 1/1: (\d\.\d+) bits per character$", output, re.MULTILINE)
    assert found, output
    assert 5 < float(found[1]) < 7
    assert len(list(tmp_path.glob("ckpt-*"))) == 1
    for program in ("transformer_2d.py --mesh 1 2", "transformer_pipeline.py --stages 2"):
        output = scripts.run(*program.split(), "--smoke")
        assert re.search(r"^epoch 1/1: \d\.\d+ bits per character$", output, re.MULTILINE), output
    script = tmp_path / "as_torchrun.py"
    script.write_text(
        f"import os, runpy, sys\nsys.path.insert(0, {str(EXAMPLES)!r})\nsys.argv = ['twin', '--smoke']\n"
        "os.environ |= {'RANK': '0', 'WORLD_SIZE': '1', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '0'}\n"
        f"runpy.run_path({str(EXAMPLES / 'transformer_torchrun.py')!r}, run_name='__main__')\n"
    )
    assert "bits per character" in scripts.run(script)


def test_trials_of_ray_tune_train_on_replicas(scripts: Scripts, tmp_path: Path) -> None:
    output = scripts.run("tune_digits.py", "--smoke", "--results", str(tmp_path))
    assert "trials: 2, failed: 0" in output
    found = re.search(r"^test accuracy: (\d\.\d+)$", output, re.MULTILINE)
    assert found, output
    assert float(found[1]) > 0.3


def test_tables_and_text_on_parameter_servers(scripts: Scripts) -> None:
    """Workers need not wait for each other."""
    for script, printed in {
        "wide_and_deep.py": r"^test loss: (\d\.\d+)$",
        "matrix_factorisation.py": r"^test error: (\d\.\d+) stars",
        "char_lstm.py": r"^bits per character: (\d\.\d+) ",
    }.items():
        output = scripts.run(script, "--strategy", "parameter_server", "--consistency", "async", "--smoke")
        found = re.search(printed, output, re.MULTILINE)
        assert found, (script, output)
        assert 0 < float(found[1]) < 6, script


def test_an_estimator_of_the_census_goes_on(tmp_path: Path, scripts: Scripts) -> None:
    flags = ("--smoke", "--strategy", "mirrored", "--model-dir", str(tmp_path))
    first, again = (scripts.run("census_estimator.py", *flags) for _ in range(2))
    results = re.findall(r"^(?:accuracy|auc|global_step|loss): (\S+)$", first, re.MULTILINE)
    assert results[2] == "10.0000"
    assert re.search(r"^the first person: - 50000\., probability 0\.\d+$", first, re.MULTILINE)
    assert re.findall(r"^(?:accuracy|auc|global_step|loss): (\S+)$", again, re.MULTILINE) == results
    assert [path.name for path in tmp_path.glob("ckpt*")] == ["ckpt-10"]


def test_tables_are_read_in_their_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    read = runpy.run_path(str(EXAMPLES / "click_data.py"))["read_table"]
    census = ["5" if place in (0, 1, 6, 17, 18, 19, 25, 31, 40) else "Private" for place in range(42)] + ["50000+."]
    clicks = ["1", *map(str, range(13)), *("68fd1e64", "") * 13]
    (tmp_path / "census.csv").write_text("\n".join([", ".join(census)] * 2))
    (tmp_path / "clicks.txt").write_text("\n".join(["\t".join(clicks)] * 3))
    for name, numbers, words, rows in (("census.csv", 7, 33, 2), ("clicks.txt", 13, 26, 3)):
        table = read(tmp_path / name)
        assert (table.numbers.shape, table.words.shape) == ((rows, numbers), (rows, words))
        assert table.targets.tolist() == [1.0] * rows
        assert (table.words // 1_000_000 == np.arange(words)).all()


def test_plain_pytorch_learns_digits_of_sklearn_or_of_a_file(tmp_path: Path, scripts: Scripts) -> None:
    accuracy, _ = results_in(scripts.run("digits_torch.py", "--epochs", "4"))
    assert accuracy >= 0.9
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 256, (60, 12, 16), dtype=np.uint8), draw.integers(0, 10, 60, dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=labels)
    results_in(scripts.run("digits_torch.py", "--data", str(tmp_path / "images.npz"), "--smoke"))


def test_images_are_loaded_by_name_and_curves_written(tmp_path: Path, scripts: Scripts) -> None:
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 256, (300, 28, 28), dtype=np.uint8), np.arange(300, dtype=np.uint8) % 10
    np.savez(tmp_path / "mnist10k.npz", images=images, labels=labels)
    for prefix, count in (("train", 60), ("t10k", 20)):
        write_idx(tmp_path, prefix, count)
    for name, sizes in {"digits": "'train': 1797", "mnist": "'test': 20", "mnist10k": "'test': 60"}.items():
        logs = tmp_path / f"logs-{name}"
        output = scripts.run(
            "mnist_by_name.py", "--name", name, "--data-dir", str(tmp_path), "--logs", str(logs), "--smoke"
        )
        assert re.search(rf"^{name}: .*{sizes}}}, classes .*0.*, .*9.*$", output, re.MULTILINE), output
        assert re.search(r"^test accuracy: [01]\.\d{3}$", output, re.MULTILINE), output
        assert any("val" in str(file) for file in logs.rglob("events.out.*"))


def test_clusters_of_digits_are_drawn(tmp_path: Path, scripts: Scripts) -> None:
    from PIL import Image

    outputs = [
        scripts.run(
            "kmeans_digits.py", "--smoke", "--clusters", "12", "--picture", str(tmp_path / "centers.png"), *flags
        )
        for flags in ((), ("--replicas", "2"))
    ]
    results = [re.findall(r"^(\d+ iterations.*|test accuracy.*)$", output, re.MULTILINE) for output in outputs]
    assert results[0] == results[1]
    accuracy = re.search(r"(\d\.\d+)$", results[0][1])
    assert accuracy
    assert float(accuracy[1]) > 0.5
    with Image.open(tmp_path / "centers.png") as picture:
        assert picture.size[1] == 10 * 8 * 6


def test_a_served_model_is_replaced_by_a_better_one(tmp_path: Path, scripts: Scripts) -> None:
    output = scripts.run("export_and_serve.py", "--smoke", "--models", str(tmp_path), "--port", str(free_ports(1)[0]))
    accuracies = [float(found) for found in re.findall(r"^version \d: accuracy (\d\.\d+)$", output, re.MULTILINE)]
    assert len(accuracies) == 2, output
    assert accuracies[1] > accuracies[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_an_example_says_which_package_is_missing(tmp_path: Path, scripts: Scripts) -> None:
    example = str(EXAMPLES / "finetune_text.py")
    script = tmp_path / "hidden.py"
    script.write_text(
        f"import runpy, sys\nfrom unittest import mock\nsys.path.insert(0, {str(EXAMPLES)!r})\n"
        f"with mock.patch.dict(sys.modules, transformers=None):\n    runpy.run_path({example!r}, run_name='__main__')\n"
    )
    scripts.run(script, status="This example needs transformers: pip install transformers")


def test_every_example_is_tested() -> None:
    files = (Path(__file__), Path(__file__).parent / "hub" / "test_finetune_text.py")
    tested = "".join(file.read_text() for file in files)
    assert {script for script in SCRIPTS if script not in tested} == set()
