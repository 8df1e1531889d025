"""Checkpoints in an object store that fails now and then, cuts off, lists late, is full, or asks who is there."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.checkpoints.run_directory import remove_checkpoint
from raydist.pipelines.stored.directory_files import directory_files
from tests.object_store.file_system import register
from tests.object_store.server import Failure, ObjectStore, serve_objects


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydist.pipelines.formats.remote_file._FIRST_WAIT_S", 0.0)


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    register()
    with serve_objects() as served:
        yield served


def objects(step: int = 0) -> tuple[rd.Checkpoint, nn.Module, rd.State]:
    model, progress = nn.Linear(4, 4), rd.State(step=step)
    return rd.Checkpoint(model=model, progress=progress), model, progress


def test_it_is_saved_and_restored(store: ObjectStore) -> None:
    checkpoint, model, _ = objects(3)
    path = checkpoint.save(store.uri("bucket/run/ckpt-3"))
    again, other, progress = objects()
    again.restore(path)
    assert progress.step == 3
    assert torch.equal(other.state_dict()["weight"], model.state_dict()["weight"])
    assert len(store.keys("bucket/run/ckpt-3/")) == 2
    checkpoint.save(path)
    assert len(store.keys("bucket/run/ckpt-3/")) == 2  # those of the first are gone


def test_passing_failures_are_retried(store: ObjectStore) -> None:
    def save_and_restore(step: int, name: str, before: Callable[[], None] = lambda: None) -> None:
        before()
        path = objects(step)[0].save(store.uri(f"bucket/run/{name}"))
        before()
        again, _, progress = objects()
        again.restore(path)
        assert progress.step == step, name

    failures: tuple[Failure, ...] = ("drop", "cut", "lost", 503)
    for failure in failures:
        for count in range(1, 8):  # at each request of a save, and of a restore

            def fail(failure: Failure = failure, count: int = count) -> None:
                store.faults.next.clear()
                store.faults.next.extend([None] * (count - 1) + [failure])

            save_and_restore(count, f"{failure}-{count}", fail)
    store.faults.next.clear()
    store.faults.failure_rate = 0.2
    for step in range(5):
        save_and_restore(step, "many")


def test_a_failed_save_keeps_the_previous_checkpoint(store: ObjectStore) -> None:
    path = objects(1)[0].save(store.uri("bucket/run/x"))
    before = store.keys()
    size = sum(map(len, filter(None, map(store.get, before))))
    troubles: dict[str, Any] = {"capacity": size + 10, "read_only": True, "down": True}
    for trouble, value in troubles.items():
        usual = getattr(store.faults, trouble)
        setattr(store.faults, trouble, value)
        with pytest.raises((OSError, rd.RaydistError)):
            objects(2)[0].save(path)
        setattr(store.faults, trouble, usual)
        assert store.keys() == before, trouble
        again, _, progress = objects()
        again.restore(path)
        assert progress.step == 1, trouble


def test_late_listings(store: ObjectStore) -> None:
    root = directory_files(store.uri("bucket/run"))
    objects(1)[0].save(store.uri("bucket/run/ckpt-1"))
    store.faults.listing_delay_s = 30.0
    objects(2)[0].save(store.uri("bucket/run/ckpt-2"))
    remove_checkpoint(root.inside("ckpt-1"))
    assert store.keys("bucket/run/ckpt-1/") == []  # although nothing was listed
    again, _, progress = objects()
    again.restore(store.uri("bucket/run/ckpt-2"))
    assert progress.step == 2


def test_credentials_are_never_printed() -> None:
    register()
    with serve_objects(login="someone:hidden") as store:
        uri = store.uri("bucket/run/x")
        assert "someone:hidden@" in uri
        checkpoint, _, _ = objects()
        checkpoint.save(uri)
        keys = list(store.keys())
        assert all(b"hidden" not in (store.get(key) or b"") for key in keys)
        for key in keys:
            if key.endswith(".safetensors"):
                store.put(key, None)
        shown = []
        for wrong in (uri, f"{uri}-none"):
            with pytest.raises(rd.RaydistError) as raised:
                checkpoint.restore(wrong)
            shown += ["".join(traceback.format_exception_only(raised.value)), repr(raised.value.__cause__)]
        store.faults.down = True
        with pytest.raises(rd.RaydistError) as raised:
            checkpoint.save(uri)
        shown += ["".join(traceback.format_exception_only(raised.value)), repr(raised.value.__cause__)]
        assert all("hidden" not in text for text in shown)
