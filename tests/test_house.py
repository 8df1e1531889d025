"""Names that can be told apart, private names of torch and Ray in `raydist/compat/` alone, and errors that teach."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import ray
import ray.data
import torch
from ray.util.placement_group import PlacementGroup
from torch.utils.data import DataLoader

from tests.conftest import LIBRARY_THREADS
from tests.import_graph import modules


def test_modules_and_threads_are_told_from_others() -> None:
    assert [path for path in modules().values() if any(path.with_suffix("").rglob("*.py"))] == [], "beside a folder"
    assert not any(f"{ours}-anything".startswith(LIBRARY_THREADS) for ours in ("raydist", "MainThread", "Thread-1"))


# --- private names ----------------------------------------------------------------------------------------------------

COMPAT = {"torch": "raydist.compat.torch_internals", "ray": "raydist.compat.ray_internals"}
MOST = {"torch": 15, "ray": 12}
# What torch._C._distributed_c10d has counts as one name.
OF_C10D = {"_distributed_c10d", "_Options", "_devices", "_timeout"}
ARGUMENTS = {"_deep_copy", "_metrics_export_port", "_node_ip_address", "_owner", "_system_config", "_temp_dir"}
# Of other libraries.
OTHERS = {("raydist.pipelines.sources.hub_datasets", "source._indices")}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def known() -> frozenset[str]:
    """Private attributes of what users of torch and Ray hold."""
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    kinds: tuple[object, ...] = (
        *(layer, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.amp.GradScaler("cpu"), layer.weight),
        *(torch.nn.BatchNorm1d(1), torch.nn.LSTM(1, 1), torch.UntypedStorage(), torch.Generator()),
        DataLoader(torch.utils.data.TensorDataset(layer.weight)),
        *(torch.nn.parameter.UninitializedParameter, torch.distributed.ProcessGroup, torch.fx.GraphModule),
        *(ray.ObjectRef, ray.actor.ActorHandle, ray.actor.ActorClass, PlacementGroup, ray.data.Dataset),
    )
    more = {"_opt_called", "_wrapped_by_lr_sched", "_is_param", "_orig_mod", "_torchdynamo_orig_callable", "_Options"}
    return frozenset(more | {name for kind in kinds for name in dir(kind) if is_private(name)})


def dotted(node: ast.AST) -> list[str]:
    """The parts of `a.b.c`; a part is empty where it is no name."""
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def bound_names(nodes: Iterable[ast.AST]) -> dict[str, list[str]]:
    """Return the parts of each imported name; modules that are imported whole stand under their full name, too."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                found[alias.name] = parts
                found[alias.asname or parts[0]] = parts if alias.asname else parts[:1]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = [*node.module.split("."), alias.name]
    return found


def own_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Private attributes and methods that a file defines."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node)[0] in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def name_of(found: str) -> str:
    """Return the name that a use counts as."""
    parts = found.split(".")
    if OF_C10D & {*parts}:
        return "_distributed_c10d"
    private = [part for part in parts if is_private(part) and part not in ("_C", "_compile", "_private")]
    return private[-1] if private else parts[-1]


def private_names(nodes: list[ast.AST], own_anywhere: set[str]) -> Iterator[tuple[str, str]]:
    """Library and name of each private name that a source uses; `self` may have what is its own anywhere."""
    bound, others = bound_names(nodes), known() - own_names(nodes)
    others_of_self = known() - own_anywhere
    for parts in bound.values():
        if parts[0] in COMPAT and any(map(is_private, parts)):
            yield parts[0], ".".join(parts)
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    inner = {node.value for node in attributes}
    for root, *rest in (dotted(node) for node in attributes if node not in inner):
        parts = [*bound.get(root, [root]), *rest]
        if parts[0] in COMPAT and any(map(is_private, rest)):
            yield parts[0], ".".join(parts)
        elif root not in bound and not (others_of_self if root in ("self", "cls") else others).isdisjoint(rest):
            yield "torch", ".".join(parts)
    yield from in_words(nodes, others)


def in_words(nodes: list[ast.AST], others: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Names that stand in strings, as for `getattr`, and names of arguments."""
    for node in nodes:
        if isinstance(node, ast.Constant) and node.value in others:
            yield "torch", str(node.value)
        elif isinstance(node, ast.keyword) and node.arg in ARGUMENTS:
            yield "ray", str(node.arg)


def test_private_names_of_torch_and_ray_stand_in_two_modules_and_stay_few() -> None:
    sources = {name: list(ast.walk(ast.parse(path.read_text()))) for name, path in modules().items()}
    own = set[str]().union(*map(own_names, sources.values()))
    found = {module: list(private_names(nodes, own)) for module, nodes in sources.items()}
    for library, module in COMPAT.items():
        used = {name_of(name) for of, name in found.pop(module) if of == library} - {"worker"}  # a module on the way
        assert 1 < len(used) <= MOST[library], sorted(used)
    assert [
        f"{module}: {name} of {library}: use a public name, or put it into {COMPAT[library]}"
        for module, names in found.items()
        for library, name in names
        if (module, name) not in OTHERS
    ] == []


# --- messages ---------------------------------------------------------------------------------------------------------

LEAST_SHARE = 0.85
VERBS = (
    "add|ask|batch|build|call|check|choose|close|convert|create|declare|decode|delete|drop|give|install|iterate|keep|"
    "leave|make|map|move|name|open|pass|put|raise|read|remove|rename|replace|return|run|save|say|set|split|start|take|"
    "try|use|wait|wrap|write"
)
INSTRUCTION = re.compile(rf"(?:^|[.:;!?,] )(?:or |and |then )?(?:{VERBS}) (?!of\b)[^ ]", re.IGNORECASE)
OBLIGATION = re.compile(r"\bmust\b|\bneeds?\b.*, got\b")
SIGNALS = ("StopIteration", "StopAsyncIteration", "NotImplementedError", "GeneratorExit")
LOOK_UPS = ("AttributeError", "IndexError", "KeyError")


def is_good(message: ast.expr) -> bool:
    match message:
        case ast.Constant(value=str(text)):
            return bool(OBLIGATION.search(text) or INSTRUCTION.search(text))
        case ast.JoinedStr(values=parts):
            return any(isinstance(part, ast.FormattedValue) for part in parts)
        case ast.BinOp(op=operator, left=left, right=right):
            return isinstance(operator, ast.Mod) or is_good(left) or is_good(right)
        case ast.IfExp(body=body, orelse=other):
            return is_good(body) and is_good(other)
    return not isinstance(message, ast.Constant)


def error_classes(error: ast.expr) -> Iterator[tuple[str, list[ast.expr]]]:
    """Each class that is raised, with its arguments; nothing for a variable or a function that makes the error."""
    if isinstance(error, ast.IfExp):
        yield from (*error_classes(error.body), *error_classes(error.orelse))
        return
    made = error.func if isinstance(error, ast.Call) else error
    name = made.id if isinstance(made, ast.Name) else made.attr if isinstance(made, ast.Attribute) else ""
    if re.fullmatch(r"[A-Z]\w*", name) and name not in SIGNALS:
        arguments = [*error.args, *(keyword.value for keyword in error.keywords)] if isinstance(error, ast.Call) else []
        text = any(isinstance(node, ast.Constant | ast.JoinedStr) for each in arguments for node in ast.walk(each))
        if text or name not in LOOK_UPS:
            yield name, arguments


def judged(source: str) -> list[tuple[str, bool]]:
    """The source of each `raise` that makes an error, and whether its message is a good one."""
    raised = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise) and node.exc]
    return [
        (ast.unparse(node), any(map(is_good, arguments)))
        for node in raised
        for _, arguments in error_classes(node.exc)  # type: ignore[arg-type]  # it is there
    ]


def test_messages_show_a_value_or_say_what_to_do() -> None:
    folders: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for path in modules().values():
        text = path.read_text()
        folders[str(path.parent)] += judged(text) if "raise " in text else []
    assert sum(map(len, folders.values())) > 400
    for folder, found in folders.items():
        bad = [text for text, good in found if not good]
        assert len(bad) <= (1 - LEAST_SHARE) * len(found), f"messages in {folder} do neither:\n" + "\n".join(bad)
