"""Random mutations of the package, and which of them the tests catch.

    python -m tests.mutations.mutate choose --count 150 --seed 0   # writes mutations.json
    python -m tests.mutations.mutate run --tree COPY               # applies one after the other, runs tests
    python -m tests.mutations.mutate run --again --tree COPY       # those that were caught once, by today's tests
    python -m tests.mutations.mutate apply 17                      # changes the file, to look at it

A mutation is one change in one line of a function: another comparison, another sign, a missing `not`, a number that is
one too large, a call left out. It is kept as the function's name and the line before and after, so that it is found
again where code has moved to another file. `run` skips those that have an answer already.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).parent / "mutations.json"
LIMIT_S = 1500
_COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: (" is ", " is not "), ast.IsNot: (" is not ", " is "),
    ast.In: (" in ", " not in "), ast.NotIn: (" not in ", " in "),
}  # fmt: skip
_SIGNS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*")
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One change.

    Attributes:
        file: Where it was found, from the project's root.
        function: The qualified name of the innermost function or class.
        before: The line, without the spaces around it.
        after: The changed line.
        caught: The test that failed; "" for none; None where nothing was run.
        again: The test that failed in a later run; "gone" where the code exists no more.
    """

    file: str
    function: str
    before: str
    after: str
    caught: str | None = None
    again: str | None = None


def mutations_of(file: Path, name: str) -> Iterator[Mutation]:
    """All mutations of one file."""
    source = file.read_text()
    lines = source.splitlines()
    for function, node in _nodes_of_functions(ast.parse(source)):
        for line, start, end, new in _changes(node, lines):
            text = lines[line - 1]
            after = text[:start] + new + text[end:]
            if after != text and _is_worth_it(text):
                yield Mutation(name, function, text.strip(), after.strip())


def _is_worth_it(line: str) -> bool:
    return "strict=" not in line and not line.strip().startswith(
        ("raise ", "@", "assert ", "_log", "def ", "class ", "f'", 'f"', '"', "#")
    )


def _nodes_of_functions(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _nodes_of_functions(child, f"{name}.{child.name}".lstrip("."))
        elif not isinstance(child, ast.Raise | ast.AnnAssign | ast.arguments | ast.JoinedStr | ast.expr_context):
            if name and not _is_type_checking(child):
                yield name, child
            yield from _nodes_of_functions(child, name)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _changes(node: ast.AST, lines: list[str]) -> Iterator[tuple[int, int, int, str]]:
    """(line, first column, last column, other text) of changes to one node itself."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _between(node.left, node.comparators[0], _COMPARISONS[type(node.ops[0])], lines)
    elif isinstance(node, ast.BinOp) and type(node.op) in _SIGNS and not _is_text(node):
        yield from _between(node.left, node.right, _SIGNS[type(node.op)], lines)
    elif isinstance(node, ast.BoolOp):
        words = (" and ", " or ") if isinstance(node.op, ast.And) else (" or ", " and ")
        yield from _between(node.values[0], node.values[1], words, lines)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.lineno, node.col_offset, node.operand.col_offset, ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        new = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
        yield node.lineno, node.col_offset, node.end_col_offset or 0, new
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.lineno == node.end_lineno:
        yield node.lineno, node.col_offset, node.end_col_offset or 0, "pass"


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(part, ast.Constant | ast.JoinedStr) and not _is_number(part) for part in (node.left, node.right)
    )


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _between(
    left: ast.expr, right: ast.expr, words: tuple[str, str], lines: list[str]
) -> Iterator[tuple[int, int, int, str]]:
    if left.end_lineno == right.lineno:
        start, end = left.end_col_offset or 0, right.col_offset
        between = lines[right.lineno - 1][start:end]
        if between.count(words[0]) == 1:
            yield right.lineno, start, end, between.replace(*words)


def choose(count: int, seed: int, leave_out: list[str]) -> list[Mutation]:
    """Random mutations: packages by the root of their sizes, so that small ones are not passed over."""
    packages: dict[str, list[Mutation]] = {}
    for file in sorted((ROOT / "raydist").rglob("*.py")):
        name = str(file.relative_to(ROOT))
        if not any(part in name for part in leave_out):
            package = name.split("/")[1] if name.count("/") > 1 else ""
            packages.setdefault(package, []).extend(mutations_of(file, name))
    draw = random.Random(seed)
    names = [name for name, found in packages.items() if found]
    weights = [len(packages[name]) ** 0.5 for name in names]
    chosen: dict[tuple[str, str], Mutation] = {}
    while len(chosen) < count:
        (package,) = draw.choices(names, weights)
        found = draw.choice(packages[package])
        chosen.setdefault((found.file, found.before), found)
    return list(chosen.values())


def apply(mutation: Mutation, tree: Path) -> Path | None:
    """Change the file in a tree; returns it, or None where the code exists no more."""
    files = [tree / mutation.file, *sorted((tree / "raydist").rglob("*.py"))]
    for file in files:
        text = file.read_text() if file.exists() else ""
        if mutation.before not in text:
            continue
        for function, node in _nodes_of_functions(ast.parse(text)):
            line = getattr(node, "lineno", 0)
            lines = text.splitlines(keepends=True)
            if (
                function.split(".")[-1] != mutation.function.split(".")[-1]
                or lines[line - 1].strip() != mutation.before
            ):
                continue
            lines[line - 1] = lines[line - 1].replace(mutation.before, mutation.after)
            file.write_text("".join(lines))
            return file
    return None


def tests_of(file: str, caught: str | None, tree: Path) -> list[list[str]]:
    """Groups of tests for a file: the one that caught it before, its own and its examples, then its package's."""
    *folders, name = Path(file).parts[1:]
    own = Path("tests", *folders, f"test_{name}")
    before = Path(caught.split("::")[0].split()[-1]) if caught and "::" in caught else own
    first = [file, *(str(path) for path in dict.fromkeys([before, own]) if (tree / path).exists())]
    parents = [before.parent, Path("tests", *folders), *Path("tests", *folders).parents[:-1]]
    folder = dict.fromkeys(str(path) for path in parents if len(path.parts) > 1 and (tree / path).exists())
    return [first, *([path] for path in folder)]


def run(mutation: Mutation, tree: Path) -> str:
    """The first test that fails with the mutation; "" if none does."""
    file = apply(mutation, tree)
    if file is None:
        return "gone"
    try:
        groups = tests_of(str(file.relative_to(tree)), mutation.caught, tree)
        return next((test for group in groups if (test := _failing(group, tree))), "")
    finally:
        subprocess.run(["git", "checkout", "-q", "--", str(file)], cwd=tree, check=True)


def _failing(tests: list[str], tree: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        found = subprocess.run(
            command,
            cwd=tree,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "PYTHONPATH": str(tree)},
        )
    except subprocess.TimeoutExpired:
        return f"not ended in {LIMIT_S} s"
    if found.returncode in (0, 5):  # 5: no test in there
        return ""
    lines = found.stdout.splitlines()
    failed = [line for kind in ("FAILED", "ERROR") for line in lines if line.startswith(kind)]
    return failed[0].split(" - ")[0] if failed else f"exit status {found.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["choose", "run", "apply"])
    parser.add_argument("number", nargs="?", type=int)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leave-out", nargs="*", default=[], help="parts of names of files")
    parser.add_argument("--tree", type=Path, default=ROOT, help="a copy of the project that may be changed")
    parser.add_argument("--part", default="0/1", help="1/2 runs every second one")
    parser.add_argument("--again", action="store_true", help="those that were caught, once more")
    parser.add_argument("--only", default="", help="a part of the name of the file that a mutation was found in")
    given = parser.parse_args()
    if given.what == "choose":
        _write(choose(given.count, given.seed, given.leave_out))
        return
    mutations = [Mutation(**entry) for entry in json.loads(KEPT.read_text())]
    if given.what == "apply":
        print(apply(mutations[given.number], given.tree))
        return
    part, parts = map(int, given.part.split("/"))
    for number, mutation in enumerate(mutations):
        wanted = mutation.again is None and mutation.caught if given.again else mutation.caught is None
        if wanted and number % parts == part and given.only in mutation.file:
            caught = run(mutation, given.tree.resolve())
            print(number, mutation.file, repr(mutation.after), "->", caught or "NOT CAUGHT", flush=True)
            current = [Mutation(**entry) for entry in json.loads(KEPT.read_text())]
            current[number] = replace(mutation, **{"again" if given.again else "caught": caught})
            _write(current)


def _write(mutations: list[Mutation]) -> None:
    KEPT.write_text(json.dumps([asdict(mutation) for mutation in mutations], indent=1) + "\n")


if __name__ == "__main__":
    main()
