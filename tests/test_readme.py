"""The README is true: its example runs as printed, its tables say what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import raydist as rd
from tests.image.samples import encode, picture
from tests.ray_head import ray_home

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def make_targets_in(text: str) -> set[str]:
    return set(re.findall(r"\bmake ([a-z]+)\b", text))


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_example_runs_as_printed(tmp_path: Path) -> None:
    example, *_ = code_blocks("python")
    script = tmp_path / "example.py"
    script.write_text(example)
    with ray_home() as home:
        done = subprocess.run(
            [sys.executable, str(script)],
            env=home.environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", done.stdout, flags=re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2


def test_examples_of_datasets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("to be or not\n\nto be")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(encode(picture(240, 300)))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for example in code_blocks("python")[1:]:
        exec(example, names)
    assert [ids[:, :3].tolist() for ids in names["token_ids"]] == [[[3, 2, 5], [0, 0, 0], [3, 2, 0]]]
    assert names["profile"].stats.bottleneck == "map-2"
    assert [(batch.shape, str(batch.dtype)) for batch in names["images"]] == [((1, 3, 224, 224), "torch.float32")]


def test_every_strategy_and_only_those_are_in_the_table() -> None:
    rows = set(re.findall(r"^\| `rd\.(\w+Strategy)\(", README, flags=re.MULTILINE))
    exported = {name for name in rd.__all__ if name.endswith("Strategy") and name != "Strategy"}
    assert rows == exported, "README's table of strategies must have a row for each that `rd` exports"


def test_every_method_of_datasets_is_in_the_table_and_no_other() -> None:
    section = README.partition("## Datasets")[2].partition("## ")[0]
    table = section.partition("\n\nNames")[0]
    methods = {name for name in dir(rd.Dataset) if not name.startswith("_")}
    assert set(re.findall(r"`(\w+)`", table)) == methods, (
        "README's table of datasets must name each method of rd.Dataset"
    )
    readers = {name for name in rd.__all__ if name.endswith("Dataset") and not isinstance(getattr(rd, name), type)}
    missing = {name for name in readers if f"`rd.{name}`" not in table}
    assert missing == set(), "README's table of datasets must name each function of `rd` that makes one"


def test_time_limits_are_the_defaults() -> None:
    rows = re.findall(r"^\| `(\w+_s)` \| ([\d,.]+) \|", README, flags=re.MULTILINE)
    printed = {name: float(value.replace(",", "")) for name, value in rows}
    assert printed == {limit.name: limit.default for limit in fields(rd.Timeouts)}


def test_printed_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    documents = README + (ROOT / "CONTRIBUTING.md").read_text()
    assert {"demo", "test"} <= make_targets_in(README)
    assert make_targets_in("\n".join(re.findall(r"^make .*|`make [a-z]+`", documents, flags=re.MULTILINE))) <= targets
    scripts = set(re.findall(r"python (examples/\w+\.py)", "\n".join(code_blocks("sh"))))
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
