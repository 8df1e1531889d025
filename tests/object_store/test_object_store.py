"""What the fake store promises to tests that use it; and that saved datasets can be kept in it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import fsspec
import pytest

import raydist as rd
from tests.object_store.file_system import LoopbackError, LoopbackFileSystem, register
from tests.object_store.server import Failure, ObjectStore, serve_objects

ERRORS: dict[Failure, type[OSError]] = {"drop": ConnectionError, "cut": ConnectionError, 503: LoopbackError}


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    register()
    with serve_objects() as served:
        yield served


@pytest.fixture
def system(store: ObjectStore) -> LoopbackFileSystem:
    found, _ = fsspec.core.url_to_fs(store.uri("bucket"))
    assert isinstance(found, LoopbackFileSystem)
    return found


def test_objects_are_written_read_listed_copied_and_removed(store: ObjectStore, system: LoopbackFileSystem) -> None:
    with fsspec.open(store.uri("bucket/a/one.bin"), "wb") as file:
        file.write(b"0123456789")
        assert store.keys() == [], "objects appear whole"
    assert system.cat_file("bucket/a/one.bin") == b"0123456789"
    with fsspec.open(store.uri("bucket/a/one.bin"), "rb") as file:
        assert (file.seek(3), file.read(4)) == (3, b"3456")
    system.mv("bucket/a/one.bin", "bucket/a/b/two.bin")
    assert [each["name"] for each in system.ls("bucket/a")] == ["bucket/a/b"]
    assert (system.isdir("bucket/a/b"), system.isfile("bucket/a/b/two.bin")) == (True, True)
    assert (system.exists("bucket/c"), system.find("bucket")) == (False, ["bucket/a/b/two.bin"])
    system.rm("bucket/a", recursive=True)
    assert store.keys() == []


def test_new_objects_replace_nothing(store: ObjectStore) -> None:
    for name, mode in (("first", "xb"), ("second", "wb")):
        with fsspec.open(store.uri(f"bucket/{name}"), mode) as file:
            file.write(name.encode())
    taken = fsspec.open(store.uri("bucket/first"), "xb").open()
    taken.write(b"other")
    with pytest.raises(FileExistsError):
        taken.close()
    assert store.get("bucket/first") == b"first"


@pytest.mark.parametrize("failure", ERRORS)
def test_requests_fail(store: ObjectStore, system: LoopbackFileSystem, failure: Failure) -> None:
    store.put("bucket/a", b"content")
    store.faults.next.extend([failure, failure, None])
    with pytest.raises(ERRORS[failure]):
        system.cat_file("bucket/a")
    with pytest.raises(ERRORS[failure]):
        system.pipe_file("bucket/b", b"content")
    assert store.get("bucket/b") is None
    assert system.cat_file("bucket/a") == b"content"
    assert [method for method, _ in store.requests] == ["GET", "PUT", "GET"]


def test_what_was_done_may_be_answered_by_silence(store: ObjectStore, system: LoopbackFileSystem) -> None:
    store.faults.next.append("lost")
    with pytest.raises(ConnectionError):
        system.pipe_file("bucket/a", b"content")
    assert store.get("bucket/a") == b"content"


def test_listings_come_late(store: ObjectStore, system: LoopbackFileSystem) -> None:
    store.faults.listing_delay_s = 0.2
    store.put("bucket/a", b"content")
    assert system.cat_file("bucket/a") == b"content"
    assert store.listed("bucket/") == {}
    time.sleep(0.25)
    store.put("bucket/a", None)
    assert store.listed("bucket/") == {"bucket/a": 7}
    assert not system.exists("bucket/a")


def test_is_full_or_read_only_or_gone(store: ObjectStore, system: LoopbackFileSystem) -> None:
    store.put("bucket/a", b"12345")
    store.faults.capacity = 9
    with pytest.raises(LoopbackError, match="507"):
        system.pipe_file("bucket/b", b"12345")
    system.pipe_file("bucket/a", b"123456789")  # in the place of the old one
    store.faults.read_only = True
    with pytest.raises(PermissionError):
        system.pipe_file("bucket/b", b"")
    with pytest.raises(PermissionError):
        system.rm_file("bucket/a")
    store.faults.down = True
    with pytest.raises(ConnectionError):
        system.info("bucket/a")
    assert store.keys() == ["bucket/a"]


def test_datasets_are_saved_there(store: ObjectStore) -> None:
    rd.Dataset.range(100).save(store.uri("bucket/numbers"))
    store.faults.failure_rate, store.faults.kinds = 0.3, ("drop", "cut", 503)
    assert [int(x) for x in rd.Dataset.load(store.uri("bucket/numbers"))] == list(range(100))


def test_credentials_come_from_the_settings_of_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    with serve_objects(login="user:secret") as store:
        uri = f"loopback://{store.address}/bucket/numbers"  # without the login
        with pytest.raises(rd.FailedPreconditionError, match="Give this node credentials"):
            rd.Dataset.range(3).save(uri)
        monkeypatch.setitem(fsspec.config.conf, "loopback", {"login": store.login})
        rd.Dataset.range(3).save(uri)
        assert [int(x) for x in rd.Dataset.load(uri)] == [0, 1, 2]
