from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.resuming.power_loss import lose_power, noted_flushes


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write(path: Path, text: str, *, flushed: bool = True) -> None:
    with path.open("a") as file:
        file.write(text)
        file.flush()
        if flushed:
            os.fsync(file)


def whole(folder: Path) -> None:
    write(folder / "a", "1")
    flush(folder)


def replaced(folder: Path) -> None:
    write(folder / "new", "2")
    (folder / "new").rename(folder / "old")
    flush(folder)


def replaced_in_vain(folder: Path) -> None:
    write(folder / "new", "2")
    (folder / "new").rename(folder / "old")


def empty(folder: Path) -> None:
    write(folder / "a", "1", flushed=False)
    flush(folder)


def nameless(folder: Path) -> None:
    write(folder / "a", "1")


def longer(folder: Path) -> None:
    write(folder / "old", "+")
    write(folder / "old", "lost", flushed=False)


def removed(folder: Path) -> None:
    (folder / "old").unlink()
    flush(folder)


def removed_in_vain(folder: Path) -> None:
    (folder / "old").unlink()


def in_folder(folder: Path) -> None:
    (folder / "b.tmp").mkdir()
    write(folder / "b.tmp" / "c", "3")
    flush(folder / "b.tmp")
    (folder / "b.tmp").rename(folder / "b")
    flush(folder)


def in_unflushed_folder(folder: Path) -> None:
    (folder / "b").mkdir()
    write(folder / "b" / "c", "3")
    flush(folder)


@pytest.mark.parametrize(
    ("use", "left"),
    [
        (whole, {"old": "0", "a": "1"}),
        (replaced, {"old": "2"}),
        (replaced_in_vain, {"old": "0"}),
        (empty, {"old": "0", "a": ""}),
        (nameless, {"old": "0"}),
        (longer, {"old": "0+"}),
        (removed, {}),
        (removed_in_vain, {"old": "0"}),
        (in_folder, {"old": "0", "b/c": "3"}),
        (in_unflushed_folder, {"old": "0"}),
    ],
)
def test_what_is_left(tmp_path: Path, use: Callable[[Path], None], left: dict[str, str]) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "old").write_text("0")
    with noted_flushes(folder, tmp_path / "notes"):
        use(folder)
    lose_power(folder, tmp_path / "notes")
    found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
