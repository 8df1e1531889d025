"""What every file format must do, whatever it is: `check_file_format(FileFormatCase(...), folder)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import fsspec

from raydist.core.errors import RaydistError
from raydist.core.nest import flatten
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import spec_of_value
from tests.contracts.op import check_op, collect, is_error, iterate, same
from tests.pipelines.mutations import cuts, mutations

__all__ = ["FileFormatCase", "check_file_format"]

CLEAR_ERRORS = {"DataLossError", "SpecError", "InvalidArgumentError", "FailedPreconditionError"}
MEMORY = "/file-format-contract"


@final
@dataclass(frozen=True)
class FileFormatCase:
    """A format, and how to write files of it.

    Attributes:
        write: Writes elements into a file (or a directory) that does not exist yet.
        read: The dataset of such files, one after the other.
        elements: At least 4, as numpy values.
        read_ahead: Datasets of the same elements in the same order, read in another way.
        suffix: What names of files end with.
        empty_error: Error of a file without elements where it is the only one; None where that is no error.
        checked: The bytes of a file that checksums protect: damage to them is an error or changes nothing. None where
            the format has no checksums: damage may give other elements of the same kind.
        counted: Whether a file says how many elements it has, so that a missing end is always noticed.
        remote: Whether files of other file systems can be read.
    """

    write: Callable[[Path, Sequence[Any]], None]
    read: Callable[[Sequence[str]], Dataset]
    elements: Sequence[Any]
    read_ahead: tuple[Callable[[Sequence[str]], Dataset], ...] = ()
    suffix: str = ""
    empty_error: str | None = None
    checked: Callable[[bytes], slice] | None = None
    counted: bool = True
    remote: bool = True


def check_file_format(case: FileFormatCase, folder: Path, *, mutants: int = 40) -> None:
    """Run every check on files that are written into `folder`, which is empty.

    Args:
        case: The format.
        folder: For files; damaged ones are restored.
        mutants: How many damaged copies of each file are read, besides shortened ones.
    """
    middle = len(case.elements) // 2 + 1
    parts = (case.elements[:middle], (), case.elements[middle:])
    paths = [folder / f"{name}{case.suffix}" for name in ("first", "empty", "last")]
    for path, part in zip(paths, parts, strict=True):
        case.write(path, part)
    files = [str(path) for path in paths]
    expected = list(case.elements)
    check_op(lambda: case.read(files[:1]), list(parts[0]))
    check_op(lambda: case.read(files), expected)
    _check_empty(case, files[1])
    _check_other_ways(case, files, expected)
    _check_missing(case, str(folder / f"missing{case.suffix}"))
    _check_remote(case, paths, expected)
    _check_damage(case, paths[0], list(parts[0]), mutants)


def _outcome(make_dataset: Callable[[], Dataset]) -> list[Any]:
    """Elements and errors; one error where there is no dataset."""
    try:
        return collect(iterate(make_dataset()), 1000)
    except RaydistError as error:
        return [(type(error).__name__, str(error))]


def _check_empty(case: FileFormatCase, file: str) -> None:
    found = _outcome(lambda: case.read([file]))
    if case.empty_error is None:
        assert found == [], "a file without elements is no error"
    else:
        assert [kind for kind, _ in found] == [case.empty_error]
        assert file in found[0][1], "an error names its file"


def _check_other_ways(case: FileFormatCase, files: Sequence[str], expected: list[Any]) -> None:
    for read in case.read_ahead:
        check_op(lambda read=read: read(files), expected)  # type: ignore[misc]
    shards = [collect(iterate(case.read(files).shard(2, index))) for index in range(2)]
    assert same(shards[0], expected[::2]), "shard 0 of 2 has every other element"
    assert same(shards[1], expected[1::2]), "shard 1 of 2 has the others"
    again = collect(iterate(case.read([*files, *files]).repeat(2)))
    assert same(again, expected * 4), "files can be read again"


def _check_missing(case: FileFormatCase, file: str) -> None:
    found = _outcome(lambda: case.read([file]))
    assert [kind for kind, _ in found] == ["NotFoundError"], f"a missing file is a NotFoundError, got {found}"
    assert file in found[0][1], "an error names its file"


def _check_remote(case: FileFormatCase, paths: Sequence[Path], expected: list[Any]) -> None:
    system = fsspec.filesystem("memory")
    uris = [f"memory:/{MEMORY}/{path.name}" for path in paths]
    try:
        for path in paths:
            for file in _files(path):
                system.pipe(f"{MEMORY}/{file.relative_to(path.parent)}", file.read_bytes())
        found = _outcome(lambda: case.read(uris))
        if case.remote:
            assert same(found, expected), "other file systems have the same elements"
        else:
            assert [kind for kind, _ in found] == ["InvalidArgumentError"]
            assert uris[0] in found[0][1], "an error names its file"
    finally:
        system.rm(MEMORY, recursive=True)


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _check_damage(case: FileFormatCase, path: Path, expected: list[Any], count: int) -> None:
    for file in _files(path):
        content = file.read_bytes()
        resumed = False
        for what, mutant in _damaged(case, content, count):
            file.write_bytes(mutant)
            found = _outcome(lambda: case.read([str(path)]))
            _check_outcome(case, found, expected, f"{what} in {file}")
            for kind, text in filter(is_error, found):
                assert kind in CLEAR_ERRORS, f"{kind} is no clear error of {what} in {file}: {text}"
                assert str(path) in text, f"the error of {what} names its file: {text}"
            if not resumed and any(map(is_error, found)) and not all(map(is_error, found)):
                _check_resume(lambda: case.read([str(path)]), found, f"{what} in {file}")
                resumed = True
        file.write_bytes(content)
    assert same(_outcome(lambda: case.read([str(path)])), expected), "reading has changed nothing"


def _check_resume(make_dataset: Callable[[], Dataset], found: list[Any], what: str) -> None:
    """Errors keep their places, and their words, when an iterator is resumed before or behind them."""
    first = iterate(make_dataset())
    for done in range(len(found) + 1):
        resumed = iterate(make_dataset())
        resumed.load_state_dict(first.state_dict())
        assert same(collect(resumed, 1000), found[done:]), f"resumed after {done} of the elements of {what}"
        resumed.close()
        collect(first, 1)
    first.close()


def _damaged(case: FileFormatCase, content: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    part = slice(None) if case.checked is None else case.checked(content)
    start, end, _ = part.indices(len(content))
    for what, mutant in mutations(content[start:end], count):
        yield f"{what} (from byte {start} on)", content[:start] + mutant + content[end:]
    yield from cuts(content, count // 4)


def _check_outcome(case: FileFormatCase, found: list[Any], expected: list[Any], what: str) -> None:
    errors = [item for item in found if is_error(item)]
    intact = [item for item in found if not is_error(item)]
    if case.checked is None:
        return _check_specs(intact, expected, what)
    left = iter(expected)
    for item in intact:
        assert any(same([item], [one]) for one in left), f"{what} gave another element: {item}"
    if not errors and not same(intact, expected):
        assert not case.counted, f"{what} lost elements without an error: {len(intact)} of {len(expected)}"
        assert same(intact, expected[: len(intact)]), f"{what} lost elements before others"
    return None


def _check_specs(found: list[Any], expected: list[Any], what: str) -> None:
    """Whatever damage has made of elements, it has not made them of another kind."""
    specs, structure = flatten(expected[0])
    for item in found:
        leaves, own = flatten(item)
        assert own == structure, f"{what} gave an element of another structure: {item}"
        for leaf, like in zip(leaves, specs, strict=True):
            assert spec_of_value(leaf).dtype == spec_of_value(like).dtype, f"{what} gave another dtype: {item}"
