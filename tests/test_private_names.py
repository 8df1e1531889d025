"""Private names of torch and Ray stand in `raydist/compat/` alone: each can be gone with their next version."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import ray.data
import torch
from ray.util.placement_group import PlacementGroup
from torch.utils.data import DataLoader

import raydist
from tests.import_graph import modules

COMPAT = {"torch": "raydist.compat.torch_internals", "ray": "raydist.compat.ray_internals"}
MOST = {"torch": 15, "ray": 12}
# What torch._C._distributed_c10d has counts as one name.
OF_C10D = {"_distributed_c10d", "_Options", "_devices", "_timeout"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_of_objects() -> set[str]:
    """Private attributes of what users of torch and Ray hold."""
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    kinds: tuple[object, ...] = (
        *(layer, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.amp.GradScaler("cpu"), layer.weight),
        *(
            torch.nn.BatchNorm1d(1),
            torch.nn.LSTM(1, 1),
            torch.UntypedStorage(),
            torch.Generator(),
            DataLoader(torch.utils.data.TensorDataset(layer.weight)),
        ),
        *(torch.nn.parameter.UninitializedParameter, torch.distributed.ProcessGroup, torch.fx.GraphModule),
        *(ray.ObjectRef, ray.actor.ActorHandle, ray.actor.ActorClass, PlacementGroup, ray.data.Dataset),
    )
    more = {"_opt_called", "_wrapped_by_lr_sched", "_is_param", "_orig_mod", "_torchdynamo_orig_callable", "_Options"}
    return more | {name for kind in kinds for name in dir(kind) if is_private(name)}


KNOWN = names_of_objects()
ARGUMENTS = {"_deep_copy", "_metrics_export_port", "_node_ip_address", "_owner", "_system_config", "_temp_dir"}


def dotted(node: ast.AST) -> list[str]:
    """The parts of `a.b.c`; a part is empty where it is no name."""
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def bound_names(tree: ast.AST) -> dict[str, list[str]]:
    """Return the parts of each imported name; modules that are imported whole stand under their full name, too."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                found[alias.name] = parts
                found[alias.asname or parts[0]] = parts if alias.asname else parts[:1]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = [*node.module.split("."), alias.name]
    return found


def own_names(tree: ast.AST) -> set[str]:
    """Private attributes and methods that a file defines."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node)[0] in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def sources() -> dict[str, Path]:
    return {name: path for name, path in modules().items() if name.split(".")[0] == raydist.__name__}


OWN = set[str]().union(*(own_names(ast.parse(path.read_text())) for path in sources().values()))
# Of other libraries.
OTHERS = {("raydist.pipelines.sources.hub_datasets", "source._indices")}


def name_of(found: str) -> str:
    """Return the name that a use counts as."""
    parts = found.split(".")
    if OF_C10D & {*parts}:
        return "_distributed_c10d"
    private = [part for part in parts if is_private(part) and part not in ("_C", "_compile", "_private")]
    return private[-1] if private else parts[-1]


def found_in(source: str) -> Iterator[tuple[str, str]]:
    """Library and name of each private name that a source uses."""
    tree = ast.parse(source)
    bound, own = bound_names(tree), own_names(tree)
    for parts in bound.values():
        if parts[0] in COMPAT and any(map(is_private, parts)):
            yield parts[0], ".".join(parts)
    for chain in chains(tree):
        root, *rest = chain
        parts = [*bound.get(root, [root]), *rest]
        if parts[0] in COMPAT and any(map(is_private, rest)):
            yield parts[0], ".".join(parts)
        elif root not in bound and not (KNOWN - (OWN if root in ("self", "cls") else own)).isdisjoint(rest):
            yield "torch", ".".join(parts)
    yield from in_words(tree, own)


def chains(tree: ast.AST) -> Iterator[list[str]]:
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    yield from (dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node not in inner)


def in_words(tree: ast.AST, own: set[str]) -> Iterator[tuple[str, str]]:
    """Names that stand in strings, as for `getattr`, and names of arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in KNOWN - own:
            yield "torch", str(node.value)
        elif isinstance(node, ast.keyword) and node.arg in ARGUMENTS:
            yield "ray", str(node.arg)


def test_other_modules_use_public_names_only() -> None:
    others = {name: path for name, path in sources().items() if name not in COMPAT.values()}
    assert [
        f"{path}: {name} of {library}: use a public name, or put it into {COMPAT[library]}"
        for module, path in others.items()
        for library, name in found_in(path.read_text())
        if (module, name) not in OTHERS
    ] == []


@pytest.mark.parametrize("library", COMPAT)
def test_they_stay_few(library: str) -> None:
    found = found_in(sources()[COMPAT[library]].read_text())
    used = {name_of(name) for of, name in found if of == library} - {"worker"}  # a module, on the way to names
    assert 1 < len(used) <= MOST[library], sorted(used)


def test_they_are_found() -> None:
    for source in [
        "import torch\ntorch._foreach_copy_([], [])",
        "import torch as t\nt._C._nn.silu",
        "from torch.nn.modules import batchnorm\nbatchnorm._BatchNorm",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "from torch.nn.utils import parametrize\nparametrize._inject_property(1, 2)",
        "def f(tensor):\n    return tensor._version",
        "def f(tensor):\n    return tensor.grad._values().sum()",
        "def f(module):\n    return getattr(module, '_modules')",
        "def f(module):\n    return vars(module)['_parameters']",
        "import ray\nray._private.worker.global_worker",
        "import ray._private.state",
        "from ray._private import state",
        "import ray\nray.init(_system_config={})",
    ]:
        assert list(found_in(source)), source
