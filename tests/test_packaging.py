"""Dependencies are pinned as pyproject.toml asks for them; the public names and the import of the package."""

from __future__ import annotations

import ast
import json
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

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from ray._private.accelerators.tpu import TPUAcceleratorManager
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config

import raydist as rd
from raydist.cluster.nodes import Cluster, Node
from raydist.cluster.resource_check import why_never
from raydist.context.devices import parse_devices
from raydist.core import errors
from raydist.options import CommunicationOptions, Timeouts
from raydist.strategies.multi_worker import choose_workers, plan_workers

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
APART = {"wandb", "mlflow", "hub", "video", "xgboost"}  # of `make test-trackers`, `test-hub` and `test-xgboost`
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


# --- links of documents -----------------------------------------------------------------------------------------------

DOCUMENTS = sorted(path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.parts))

# [text](target) and ![text](target), but not in code blocks, which `text_of` removes.
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def text_of(markdown: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", markdown, flags=re.DOTALL)


def anchors_of(markdown: str) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", markdown, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> list[str]:
    broken = []
    for target in LINK.findall(text_of(document.read_text())):
        path, _, anchor = target.partition("#")
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors_of(file.read_text())):
            broken.append(target)
    return broken


def test_top_level_folders_are_links_into_the_package_and_committed_as_links() -> None:
    for name in ("actors", "pipelines"):
        link = ROOT / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / "raydist" / name
        assert (link / "__init__.py").is_file()
        listed = subprocess.run(
            ["git", "ls-files", "--stage", name], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
        ).stdout
        if listed or (ROOT / ".git").exists():  # an unpacked archive has neither
            assert listed.startswith("120000 ")


def test_links_of_documents_resolve() -> None:
    broken = {str(document.relative_to(ROOT)): broken_links(document) for document in DOCUMENTS}
    assert {document: links for document, links in broken.items() if links} == {}


# --- clusters of ray up and KubeRay -----------------------------------------------------------------------------------

DEPLOY = ROOT / "deploy"
LAUNCHER = [ROOT / "cluster.yaml", DEPLOY / "gcp-gpu.yaml", DEPLOY / "gcp-tpu.yaml"]


def load(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    return config


def test_clusters_pass_the_validation_of_ray_up_and_are_in_the_table() -> None:
    for path in LAUNCHER:
        config = prepare_config(load(path))
        validate_config(config)
        assert config["head_node_type"] in config["available_node_types"], path
        with pytest.raises(jsonschema.ValidationError, match="availble_node_types"):
            validate_config(prepare_config({**load(path), "availble_node_types": {}}))
    table = (DEPLOY / "README.md").read_text()
    assert all(f"]({path.name})" in table for path in DEPLOY.glob("*.yaml"))


def test_gpu_nodes_hold_what_replicas_ask_for() -> None:
    kinds = load(DEPLOY / "gcp-gpu.yaml")["available_node_types"]
    gpus = kinds["gpu-replica"]
    nodes = tuple(Node(str(index), "10.0.0.1", gpus["resources"]) for index in range(gpus["max_workers"]))
    count, devices = choose_workers(nodes, None, None)
    plan = plan_workers(
        "m",
        count,
        devices,
        Cluster(False, nodes),
        resources=None,
        timeouts=Timeouts(),
        communication=CommunicationOptions(),
    )
    assert [device.kind for device in parse_devices(devices, gpus_on_node=1)] == ["GPU"]
    assert why_never(plan.bundles, [node.resources for node in nodes], plan.placement) is None
    assert why_never(plan.bundles, [kinds["cpu-input"]["resources"]] * 9, plan.placement) is not None


def test_a_slice_of_the_launcher_is_two_hosts_of_four_chips() -> None:
    (kind,) = [kind for name, kind in load(DEPLOY / "gcp-tpu.yaml")["available_node_types"].items() if name != "head"]
    accelerator = kind["node_config"]["acceleratorType"]
    assert TPUAcceleratorManager.is_valid_tpu_accelerator_type(accelerator)
    assert accelerator == "v4-16"  # sixteen cores: two a chip
    assert kind["resources"] == {"TPU": 4}
    assert kind["min_workers"] == kind["max_workers"] == 1  # never scaled


def test_kuberay_s_autoscaler_reads_slices_out_of_the_ray_cluster() -> None:
    cluster = load(DEPLOY / "kuberay-tpu.yaml")
    cluster["metadata"]["namespace"] = "default"
    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    tpu = types["tpu-slice"]
    assert (tpu["resources"]["TPU"], tpu["resources"]["TPU-v4-16-head"]) == (4, 1)
    assert (tpu["min_workers"], tpu["max_workers"]) == (0, 2 * 2)  # hosts: two slices of two
    assert types["cpu-input"]["resources"]["CPU"] == 32
    assert why_never([{"TPU": 4.0}] * 2, [tpu["resources"]] * 2, "STRICT_SPREAD") is None


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    dashboard = json.loads((DEPLOY / "raydist_grafana_dashboard.json").read_text())
    expressions = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    asked = {name.removesuffix("_total") for name in re.findall(r"ray_(raydist_\w+)", expressions)}
    source = "".join(path.read_text() for path in (ROOT / "raydist" / "actors").rglob("*.py"))
    made = set(re.findall(r'"(raydist_\w+)"', source))
    made |= {f"raydist_parameter_server_{name}" for name in re.findall(r'^    "(\w+)":', source, flags=re.MULTILINE)}
    assert asked <= made
    assert {"raydist_steps", "raydist_examples", "raydist_input_wait_seconds", "raydist_input_queue_fill"} <= asked
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "SessionName"]
