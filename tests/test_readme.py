"""The README is true: its example runs as printed, its tables say what the code says."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import raydist as rd
from tests.image.samples import encode, picture
from tests.shared_scripts import Scripts

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def make_targets_in(text: str) -> set[str]:
    return set(re.findall(r"\bmake ([a-z]+)\b", text))


def on_replicas() -> list[str]:
    return [block for block in code_blocks("python") if re.search("(Mirrored|ParameterServer)Strategy", block)]


def changed_lines(block: str) -> list[str]:
    return re.findall(r"# (\d): ", block)


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_examples_on_replicas_run_as_printed(tmp_path: Path, scripts: Scripts) -> None:
    printed = []
    for example in on_replicas():
        (tmp_path / "example.py").write_text(example)
        printed.append(scripts.run(tmp_path / "example.py"))
    whole, steps, fit, tokens, servers = printed
    for turn, name, output in [("epoch", "error", whole), ("epoch", "loss", steps), ("round", "loss", servers)]:
        found = re.findall(rf"^{turn} \d: {name} ([\d.]+)$", output, flags=re.MULTILINE)
        numbers = [float(number) for number in found]
        assert len(numbers) == 5
        assert numbers[-1] < numbers[0] / 2
    assert "Epoch 5/5" in fit
    losses = [float(number) for number in re.findall(r"\bloss:? ([\d.]+)", fit)]
    assert losses[-1] < losses[0] / 5, fit
    assert re.fullmatch(r"\s*loss [34]\.\d\d a token\s*", tokens)


def test_the_shortest_way_in_comes_first_and_changes_three_lines() -> None:
    first, *_ = code_blocks("python")
    assert changed_lines(first) == ["1", "2", "3"]
    body = first.partition("def train(batches)")[2].partition("\n\n\n")[0]
    assert "rd." not in body
    assert "strategy" not in body


def test_the_shortest_way_in_is_the_loop_of_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = code_blocks("python")
    on_one_device = first.replace("rd.MirroredStrategy(2)", 'rd.OneDeviceStrategy("cpu")')
    plain = re.sub(r"^with .*# 1.*$", "if True:", first, flags=re.MULTILINE)
    plain = re.sub(r"^.*# 2.*\n", "", plain, flags=re.MULTILINE)
    plain = re.sub(r"strategy.run\(.*# 3: was (.*)$", r"\1", plain, flags=re.MULTILINE)
    assert "strategy" not in plain
    exec(on_one_device, {})
    printed = capsys.readouterr().out
    exec(plain, {})
    assert capsys.readouterr().out.count("error") == printed.count("error") == 5


def test_readme_says_what_several_replicas_change() -> None:
    section = README.partition("### What a step means on several replicas")[2].partition("\n## ")[0]
    for word in ("gradient_reduce_op", "ReduceOp.SUM", "compute_average_loss", "SyncBatchNorm.convert", "copied"):
        assert word in section


def test_examples_of_datasets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("to be or not\n\nto be")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(encode(picture(240, 300)))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for example in code_blocks("python"):
        if example not in on_replicas():
            exec(example, names)
    assert [ids[:, :3].tolist() for ids in names["token_ids"]] == [[[3, 2, 5], [0, 0, 0], [3, 2, 0]]]
    assert names["profile"].stats.bottleneck == "map-2"
    assert [(batch.shape, str(batch.dtype)) for batch in names["images"]] == [((1, 3, 224, 224), "torch.float32")]


def test_every_strategy_and_only_those_are_in_the_table() -> None:
    rows = set(re.findall(r"^\| `rd\.(\w+Strategy)\(", README, flags=re.MULTILINE))
    named = {name for name in rd.__all__ if name.endswith("Strategy")}
    exported = {name for name in named if not inspect.isabstract(getattr(rd, name))}  # the others are bases
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
