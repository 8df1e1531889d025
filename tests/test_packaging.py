"""Dependencies are pinned as pyproject.toml asks for them; the public names and the import of the package."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import raydist as rd
from raydist.core import errors

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
APART = {"wandb", "mlflow"}  # in the environment of `make test-trackers`
REQUIREMENTS = [
    Requirement(text)
    for group in (PROJECT["dependencies"], *(EXTRAS[name] for name in EXTRAS.keys() - APART))
    for text in group
]


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_dependencies_are_pinned_within_their_ranges_and_the_oldest_is_tested() -> None:
    for requirement in REQUIREMENTS:
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), requirement
    for requirement in map(Requirement, PROJECT["dependencies"]):
        (bound,) = requirement.specifier
        oldest = pins("constraints-oldest.txt")[canonicalize_name(requirement.name)]
        assert (bound.operator, Version(bound.version)) == (">=", Version(oldest)), requirement


def test_imported_libraries_are_declared() -> None:
    declared = {canonicalize_name(requirement.name) for requirement in REQUIREMENTS}
    imported = {
        match
        for path in (ROOT / "raydist").rglob("*.py")
        for match in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), flags=re.MULTILINE)
    }
    libraries = {"cloudpickle", "fsspec", "numpy", "pyarrow", "ray", "rich", "safetensors", "torch", "torchmetrics"}
    assert imported & libraries == libraries & declared


def test_ci_runs_the_commands_of_the_readme_and_the_linters() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert {"venv", "lint", "test"} <= set(re.findall(r"^make .*?(\w+)\s*\|\|", script.read_text(), flags=re.MULTILINE))


def test_a_clone_beside_a_script_does_not_hide_the_package(tmp_path: Path) -> None:
    """After `pip install -e ./raydist`: the clone is a folder of the package's name, with the package inside."""
    pytest.importorskip("setuptools")
    clone, site = tmp_path / "raydist", tmp_path / "site"
    (clone / "raydist").mkdir(parents=True)
    (clone / "raydist" / "__init__.py").write_text("found = True\n")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone / name)
    build = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True, timeout=50)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    use = f"import site; site.addsitedir({str(site)!r}); import raydist; print(raydist.found)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", use], cwd=tmp_path, env={}, capture_output=True, text=True, timeout=50
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_wheel_and_sdist_run_the_example_in_a_fresh_environment(tmp_path: Path) -> None:
    source, dist = tmp_path / "source", tmp_path / "dist"
    shutil.copytree(ROOT / "raydist", source / "raydist", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for kind in ("wheel", "sdist"):
        build = f"from setuptools.build_meta import build_{kind}; build_{kind}({str(dist)!r})"
        subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=100)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        assert {"pyproject.toml", "raydist/py.typed"} <= {name.partition("/")[2] for name in file.getnames()}
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True, timeout=100)
    python = str(tmp_path / "env" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(install, check=True, timeout=900)
    (example, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    done = subprocess.run([python, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True)
    assert re.findall(r"^epoch (\d): error", done.stdout, re.MULTILINE) == list("01234"), done.stdout


def test_import_loads_neither_torch_nor_ray_nor_numpy() -> None:
    code = "import sys, raydist; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert "raydist" in loaded
    assert not loaded & {"torch", "ray", "numpy", "pyarrow", "torchmetrics", "rich"}


def test_public_names_exist_and_are_those_that_type_checkers_see() -> None:
    assert [name for name in rd.__all__ if getattr(rd, name) is None or name not in dir(rd)] == []
    assert set(errors.__all__) <= set(rd.__all__)
    assert rd.__version__ == metadata.version("raydist")
    tree = ast.parse(Path(rd.__file__).read_text())
    nodes = [node for block in tree.body if is_for_type_checkers(block) for node in ast.walk(block)]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    declared = {alias.asname: node.module for node in imports for alias in node.names}
    assert declared == rd._MODULE_OF


def is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
