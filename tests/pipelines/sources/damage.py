"""What readers make of damaged files, found out in a child process, which a library may crash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import final

from tests.pipelines.mutations import mutations

__all__ = ["Report", "report_damage"]

_CHILD = """
import json, sys
from pathlib import Path
from tests.contracts.op import collect, is_error, iterate, same
import raydist as rd

folder, method, good = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
read = getattr(rd.Dataset, method)
expected = collect(iterate(read(good)))
for path in sorted(folder.iterdir()):
    print(json.dumps(["begin", path.name]), flush=True)
    try:
        found = collect(iterate(read(str(path))), 1000)
    except rd.RaydistError as error:
        found = [(type(error).__name__, str(error))]
    errors = [item for item in found if is_error(item)]
    intact = [item for item in found if not is_error(item)]
    known = all(any(same([item], [one]) for one in expected) for item in intact)
    kind = errors[0][0] if errors else "same" if same(found, expected) else "other"
    named = all(str(path) in text and "byte " in text for name, text in errors if name == "DataLossError")
    print(json.dumps([kind, path.name, known, named]), flush=True)
"""


@final
@dataclass(frozen=True)
class Report:
    """What became of each damaged copy: the type of the first error, "same" data or "other" data.

    Attributes:
        outcomes: One word a copy.
        invented: Copies that gave rows which the intact file does not have.
        unnamed: Copies with a DataLossError that names neither file nor offset.
    """

    outcomes: tuple[str, ...]
    invented: list[str]
    unnamed: list[str]

    @property
    def kinds(self) -> set[str]:
        """The words that there are."""
        return set(self.outcomes)

    def count(self, kind: str) -> int:
        """How many copies had this outcome."""
        return Counter(self.outcomes)[kind]


def report_damage(folder: Path, method: str, content: bytes, count: int) -> Report:
    """Read `count` damaged copies of a file with a method of Dataset. AssertionError if the process dies."""
    copies = folder / "copies"
    copies.mkdir()
    words = {}
    for number, (what, mutant) in enumerate(mutations(content, count)):
        (copies / f"{number:03d}").write_bytes(mutant)
        words[f"{number:03d}"] = what
    good = folder / "good"
    good.write_bytes(content)
    command = [sys.executable, "-c", _CHILD, str(copies), method, str(good)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=Path(__file__).parents[3])
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    last = lines[-1][1] if lines else "none"
    assert child.returncode == 0, f"died (code {child.returncode}) at {last}: {words.get(last)}\n{child.stderr[-2000:]}"
    found = [line for line in lines if line[0] != "begin"]
    return Report(
        tuple(kind for kind, *_ in found),
        [f"{name}: {words[name]}" for _, name, known, _ in found if not known],
        [f"{name}: {words[name]}" for _, name, _, named in found if not named],
    )
