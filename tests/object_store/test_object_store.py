"""Saved datasets can be kept in an object store; credentials come from fsspec."""

from __future__ import annotations

import fsspec
import pytest

import raydist as rd
from raydist.pipelines.stored.directory_files import directory_files
from tests.object_store.file_system import register
from tests.object_store.server import Failure, serve_objects


def test_datasets_are_saved_there_though_requests_fail() -> None:
    register()
    with serve_objects() as store:
        rd.Dataset.range(100).save(store.uri("bucket/numbers"))
        store.faults.failure_rate, store.faults.kinds = 0.3, ("drop", "cut", 503)
        assert [int(x) for x in rd.Dataset.load(store.uri("bucket/numbers"))] == list(range(100))


def test_a_file_is_not_missing_because_a_request_failed() -> None:
    register()
    with serve_objects() as store:
        files = directory_files(store.uri("bucket/run"))
        store.put("bucket/run/manifest.json", b"{}")
        failures: tuple[Failure, ...] = ("drop", "cut", "lost", 503)
        for failure in failures:
            store.faults.next.append(failure)
            assert files.exists("manifest.json"), failure
            assert not store.faults.next
        assert not files.exists("other.json")


def test_credentials_come_from_the_settings_of_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    with serve_objects(login="user:secret") as store:
        uri = f"loopback://{store.address}/bucket/numbers"  # without the login
        with pytest.raises(rd.FailedPreconditionError, match="Give this node credentials"):
            rd.Dataset.range(3).save(uri)
        monkeypatch.setitem(fsspec.config.conf, "loopback", {"login": store.login})
        rd.Dataset.range(3).save(uri)
        assert [int(x) for x in rd.Dataset.load(uri)] == [0, 1, 2]
