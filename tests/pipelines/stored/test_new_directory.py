from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
import pytest

from raydist.core.errors import FailedPreconditionError, NotFoundError
from raydist.pipelines.stored.write import NewDirectory, remove_remains


def put(directory: NewDirectory, name: str, content: bytes) -> None:
    file = directory.create(f"{directory.prefix}{name}")
    file.write(content)
    directory.finish(file)


def names(path: str) -> list[str]:
    system, inner = fsspec.core.url_to_fs(path)
    return [name.rpartition("/")[2] for name in system.find(inner)]


@pytest.fixture(params=["local", "remote"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "x") if request.param == "local" else f"memory://{uuid.uuid4().hex}/x"


def test_it_appears_at_the_end(target: str) -> None:
    directory = NewDirectory(target)
    directory.check_new()
    put(directory, "a", b"data")
    assert "manifest.json" not in names(target)
    directory.commit(b"manifest")
    assert sorted(names(target)) == sorted([f"{directory.prefix}a", "manifest.json"])
    with fsspec.open(f"{target}/manifest.json") as file:
        assert file.read() == b"manifest"
    with pytest.raises(FailedPreconditionError, match="does not exist yet"):
        NewDirectory(target).check_new()


def test_of_two_writers_the_first_wins_and_the_other_leaves_nothing(target: str) -> None:
    first, second = NewDirectory(target), NewDirectory(target)
    put(first, "a", b"first")
    put(second, "a", b"second")
    first.commit(b"1")
    kept = sorted([f"{first.prefix}a", "manifest.json"])
    with pytest.raises(FailedPreconditionError):
        second.commit(b"2")
    assert sorted(names(target)) == kept
    with fsspec.open(f"{target}/{first.prefix}a") as file:
        assert file.read() == b"first"


def test_what_is_abandoned_leaves_nothing(target: str) -> None:
    directory = NewDirectory(target)
    put(directory, "a", b"data")
    directory.abandon()
    directory.abandon()
    assert names(target) == []


def test_remains_of_a_crash_are_removed(tmp_path: Path) -> None:
    crashed, other = NewDirectory(tmp_path / "x"), NewDirectory(tmp_path / "y")
    put(crashed, "a", b"data")
    put(other, "a", b"data")
    remove_remains(str(tmp_path / "x"))
    assert [path.name.split(".")[1] for path in tmp_path.iterdir()] == ["y"]
    remove_remains(str(tmp_path / "missing" / "x"))


def test_a_parent_must_exist(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        NewDirectory(tmp_path / "no" / "x").create("a")


def test_an_empty_directory_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    directory = NewDirectory(tmp_path / "x")
    put(directory, "a", b"data")
    (tmp_path / "x").mkdir()
    with pytest.raises(FailedPreconditionError, match="does not exist yet"):
        directory.commit(b"1")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
