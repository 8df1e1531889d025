"""The process that is attacked. It works through damaged copies and says on each line what it is at.

A line `["CASE", FIRST, END, "FOLDER"]` asks for copies. It writes `begin NUMBER` before each of them, a JSON list
behind it ([number, outcome, words, bytes of memory]), and `end` behind the last.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import resource
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import raydist as rd
from tests.contracts.op import same
from tests.hostile.cases import CASES, FileCase
from tests.hostile.mutants import Mutant, mutant, tampered
from tests.hostile.states import make_pipelines

STATES = "states"
MAX_ITEMS = 1000
_ADDRESS_SPACE = 16 << 30  # the machine must outlive what is found
_MEMORY_FILES = (Path("/proc/self/clear_refs"), Path("/proc/self/status"))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    for line in sys.stdin:
        name, first, end, folder = json.loads(line)
        make = state_outcomes if name == STATES else functools.partial(file_outcomes, CASES[name])
        for outcome in make(Path(folder), first, end):
            print(json.dumps(outcome), flush=True)
        print("end", flush=True)


def file_outcomes(case: FileCase, folder: Path, first: int, end: int) -> Iterator[tuple[int, str, str, int]]:
    """One outcome a copy. Of a directory, its files take turns."""
    path = folder / case.name
    if not path.exists():
        case.write(path)
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    contents = [file.read_bytes() for file in files]
    expected, errors = read_items(case, str(path))
    assert expected, "the good file is read"
    assert not errors, errors
    for number in range(first, end):
        begin(number)
        which = number % len(files)
        damage = mutant(contents[which], number)
        files[which].write_bytes(damage.content)
        with_memory = Memory()
        found, errors = read_items(case, str(path))
        used = with_memory.used() - len(damage.content)
        outcome, words = judge(case, contents[which], damage, expected, found, errors)
        yield number, outcome, f"{files[which].name}: {damage.what}: {words}", used
        files[which].write_bytes(contents[which])


def read_items(case: FileCase, path: str) -> tuple[list[Any], list[BaseException]]:
    found: list[Any] = []
    errors: list[BaseException] = []
    try:
        iterator = case.elements(path)
        while len(found) + len(errors) < MAX_ITEMS:
            try:
                found.append(copy.deepcopy(next(iterator)))
            except StopIteration:
                break
            except rd.RaydistError as error:
                errors.append(error)
    except BaseException as error:
        errors.append(error)
    return found, errors


def judge(
    case: FileCase, content: bytes, damage: Mutant, expected: list[Any], found: list[Any], errors: list[BaseException]
) -> tuple[str, str]:
    """`raw`: an error that is not raydist's. `silent`: other elements, although what was changed has a checksum."""
    if errors and not isinstance(errors[-1], rd.RaydistError):
        return "raw", words_of(errors[-1])
    other = not same(found, expected) if not errors else not is_part(found, expected)
    if other and is_sealed(case, content, damage) and not case.unknowable(content, damage):
        return "silent", f"{len(found)} elements of {len(expected)}, {len(errors)} errors"
    if errors:
        return type(errors[0]).__name__, str(errors[0])[:300]
    return ("other" if other else "same"), ""


def is_part(found: list[Any], expected: list[Any]) -> bool:
    left = iter(expected)
    return all(any(same([item], [one]) for one in left) for item in found)


def is_sealed(case: FileCase, content: bytes, damage: Mutant) -> bool:
    end = len(content) + 1 if damage.end is None else damage.end
    return any(sealed.start <= damage.start and end <= sealed.stop for sealed in case.sealed(content))


def state_outcomes(folder: Path, first: int, end: int) -> Iterator[tuple[int, str, str, int]]:
    """One outcome a tampered state; pipelines take turns."""
    pipelines = make_pipelines(folder)
    names = sorted(pipelines)
    states = {}
    for number in range(first, end):
        name = names[number % len(names)]
        begin(number)
        if name not in states:
            iterator = pipelines[name]()
            for _ in range(1 + number % 5):
                next(iterator)
            states[name] = json.loads(json.dumps(iterator.state_dict()))
            iterator.close()
        state, what = tampered(states[name], number)
        memory = Memory()
        outcome, words = load(pipelines[name](), state)
        yield number, outcome, f"{name}: {what}: {words}", memory.used()


def load(iterator: Any, state: Any) -> tuple[str, str]:
    try:
        iterator.load_state_dict(state)
        for _ in range(3):
            next(iterator, None)
    except rd.RaydistError as error:
        return type(error).__name__, str(error)[:300]
    except BaseException as error:
        return "raw", words_of(error)
    finally:
        iterator.close()
    return "other", ""


class Memory:
    """The most memory held since this was made, in bytes, beyond what was held then."""

    def __init__(self) -> None:
        _MEMORY_FILES[0].write_text("5")  # proc(5): the peak begins anew
        self._before = _status("VmRSS")

    def used(self) -> int:
        return _status("VmHWM") - self._before


def _status(field: str) -> int:
    lines = _MEMORY_FILES[1].read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def begin(number: int) -> None:
    print("begin", number, flush=True)


def words_of(error: BaseException) -> str:
    """Type, message and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames[-4:][::-1])
    return f"{type(error).__name__}: {str(error)[:200]} ({where})"


if __name__ == "__main__":
    main()
