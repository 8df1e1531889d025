"""The README and the pages of docs/ are true: programs run, tables say what the code says, the site builds."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import raydist as rd
from raydist.datasets.loading import _builders
from tests.shared_scripts import Scripts

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}

# A program of a page, in the order of the page: ```python blocks, the new side of ```diff blocks, and code in comments
# (<!-- setup ... -->, <!-- check ... -->), which readers do not see. <!-- skip: why --> leaves out the next block.
PART = re.compile(
    r"^<!-- (?P<kind>setup|check)\n(?P<hidden>.*?)^-->"
    r"|^(?P<skip><!-- skip: [^>]*-->\s*)?^```(?P<language>python|diff)\n(?P<code>.*?)^```",
    flags=re.MULTILINE | re.DOTALL,
)


def program_of(page: str) -> str:
    """What a reader of a page types, as one script."""
    parts = []
    for part in PART.finditer(page):
        if part["hidden"]:
            parts.append(part["hidden"])
        elif not part["skip"]:
            parts.append(new_side(part["code"]) if part["language"] == "diff" else part["code"])
    return "\n".join(parts)


def new_side(diff: str) -> str:
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if not line.startswith("-"))


PROGRAMS = {name: program for name, page in PAGES.items() if (program := program_of(page))}
ON_RAY = re.compile(r"(Mirrored|ParameterServer)Strategy\(|num_input_workers=")


def test_programs_are_found() -> None:
    shown = "```python\nb\n```\n<!-- skip: c -->\n\n```python\nd\n```\n```diff\n-e\n+f\n\n g\n```\n```sh\nh\n```"
    page = f"<!-- setup\na\n-->\n\n{shown}"
    assert program_of(page) == "a\n\nb\n\nf\n\ng\n"
    assert len(PROGRAMS) > 10


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_programs_on_replicas_run(tmp_path: Path, scripts: Scripts) -> None:
    for number, (name, program) in enumerate(PROGRAMS.items()):
        if not ON_RAY.search(program):
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        script = folder / "page.py"
        script.write_text(f"# {name}\nimport os\nos.chdir({str(folder)!r})\n{program}\n")
        printed = scripts.run(script)
        found = re.findall(r"^(?:epoch|round) 4: (?:error|loss) ([\d.]+)$", printed, re.MULTILINE)
        # x**2 has a variance of 0.09: the models have learned.
        assert all(float(value) < 0.05 for value in found), (name, printed)


@pytest.mark.timeout(120)
def test_programs_in_one_process_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (name, program) in enumerate(PROGRAMS.items()):
        if ON_RAY.search(program):
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        names: dict[str, Any] = {"__name__": "page"}
        exec(compile(program, name, "exec"), names)  # an error names the page
        names.clear()  # functions of the page refer to it, and it to pools of workers


def test_the_shortest_way_in_changes_three_lines_of_the_loop_of_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    first: str = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)[0]
    assert re.findall(r"# (\d): ", first) == ["1", "2", "3"]
    body = first.partition("def train(batches)")[2].partition("\n\n\n")[0]
    assert "rd." not in body
    assert "strategy" not in body
    on_one_device = first.replace("rd.MirroredStrategy(2)", 'rd.OneDeviceStrategy("cpu")')
    plain = re.sub(r"^with .*# 1.*$", "if True:", first, flags=re.MULTILINE)
    plain = re.sub(r"^.*# 2.*\n", "", plain, flags=re.MULTILINE)
    plain = re.sub(r"strategy.run\(.*# 3: was (.*)$", r"\1", plain, flags=re.MULTILINE)
    assert "strategy" not in plain
    exec(on_one_device, {})
    printed = capsys.readouterr().out
    exec(plain, {})
    assert capsys.readouterr().out.count("error") == printed.count("error") == 5


def test_tables_of_strategies_are_complete() -> None:
    assert len(README.splitlines()) <= 200
    named = {name for name in rd.__all__ if name.endswith("Strategy")}
    exported = {name for name in named if not inspect.isabstract(getattr(rd, name))}  # the others are bases
    for page in ("README.md", "docs/strategies.md"):
        rows = re.findall(r"^\| `rd\.(\w+Strategy)\([^|]*` \|[^|]*\|[^|]*\|[^|]*\|$", PAGES[page], flags=re.MULTILINE)
        assert set(rows) == exported, f"the table of strategies in {page} must have a row for each that `rd` exports"


def test_table_of_datasets_is_complete() -> None:
    table = PAGES["docs/input/index.md"].partition("## Operations")[2].partition("\n## ")[0]
    methods = {name for name in dir(rd.Dataset) if not name.startswith("_")}
    assert set(re.findall(r"`(\w+)`", table)) == methods, "docs/input/index.md must name each method of rd.Dataset"
    readers = {name for name in rd.__all__ if name.endswith("Dataset") and not isinstance(getattr(rd, name), type)}
    assert {name for name in readers if f"`rd.{name}`" not in table} == set()


def test_table_of_data_sets_is_complete() -> None:
    table = PAGES["docs/datasets.md"].partition("| name |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)(?:[/:]<[^`]*|/movies)?`", table))
    ours = {name for name in rd.list_builders() if _builders()[name].__module__.startswith("raydist.")}
    assert ours - named == set(), "docs/datasets.md must have a row for each data set"


def test_time_limits_are_the_defaults() -> None:
    rows = re.findall(r"^\| `(\w+_s)` \| ([\d,.]+) \|", PAGES["docs/strategies.md"], flags=re.MULTILINE)
    printed = {name: float(value.replace(",", "")) for name, value in rows}
    assert printed == {limit.name: limit.default for limit in fields(rd.Timeouts)}


def test_api_pages_have_every_public_name_once() -> None:
    shown = re.findall(r"^::: raydist\.(?:[\w.]*\.)?(\w+)$", "\n".join(PAGES.values()), flags=re.MULTILINE)
    assert sorted(shown) == sorted(set(rd.__all__) - {"__version__"})


def test_printed_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    documents = "\n".join([*PAGES.values(), (ROOT / "CONTRIBUTING.md").read_text()])
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)\b", documents, flags=re.MULTILINE))
    assert {"demo", "test", "docs"} <= named <= targets
    scripts = set(re.findall(r"python (examples/\w+\.py)", documents))
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


@pytest.mark.timeout(240)
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=220, check=False)
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    page = (tmp_path / "site" / "api" / "datasets" / "index.html").read_text()
    assert "bucket_by_sequence_length" in page
    assert ":class:" not in page
    assert re.findall(r'(?:src|rel="stylesheet" href)="https?:[^"]*', page) == []  # nothing is loaded from elsewhere
    links = re.findall(r'(?:href|src)="(?!\w+:)([^"#]+)', page)
    missing = [link for link in links if not (tmp_path / "site" / "api" / "datasets" / link).resolve().exists()]
    assert missing == []
