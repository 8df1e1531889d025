from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path

import pytest

from raydist.core.errors import FailedPreconditionError
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.producers import BorderIterator
from raydist.pipelines.engine.resume import read_items
from raydist.pipelines.run.plan import open_iterator
from raydist.pipelines.stored.cached_epoch import (
    CachedEpoch,
    CachedEpochSettings,
    FileLock,
    Recorder,
    Store,
)
from raydist.pipelines.stored.containers import Container


def numbers(size: int) -> OpIterator:
    op = Dataset.range(size)._op
    return open_iterator(op, seed=0, epoch=0, options=Options(), executor=InlineExecutor())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "x"), Container.of("arrow", None))


def test_an_input_that_has_become_shorter(store: Store) -> None:
    def one_pass(size: int) -> BorderIterator:
        return BorderIterator(CachedEpoch(CachedEpochSettings(store, lambda: numbers(size), 1, "cache", False)))

    first = one_pass(5)
    read_items(first, 4)
    state = first.state_dict()
    first.close()
    resumed = one_pass(3)
    resumed.load_state_dict(state)
    with pytest.raises(FailedPreconditionError, match="it ended 1 elements earlier"):
        resumed.next_block(1)
    assert store.find() is None


ARROW = Container.of("arrow", None)
BLOCK = block_of_rows([1, 2, 3])


def recorded(store: Store, origin: str) -> Recorder:
    recorder = Recorder(store, origin)
    recorder.open()
    recorder.write(BLOCK)
    return recorder


def test_where_nothing_locks_the_first_who_finishes_wins() -> None:
    store = Store(f"memory://{uuid.uuid4().hex}/x", ARROW)
    assert store.lock() is None
    first, second = (recorded(store, origin) for origin in ("first", "second"))
    second.commit()
    first.commit()
    found = store.find()
    assert found is not None
    assert found.origin == "second"


def test_one_holder_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.lock"
    path.write_text("process 1 on another machine, which died")  # a file that was left is no lock
    first, second = (FileLock(str(path)) for _ in range(2))
    assert first.acquire()
    assert not second.acquire()
    assert second.holder().startswith(f"process {os.getpid()} on ")
    first.release()
    first.release()
    assert list(tmp_path.iterdir()) == []
    assert second.holder() == "somebody who has just gone"
    assert second.acquire()
    second.release()
    flock = fcntl.flock

    def removed_before(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()  # its holder goes between our opening and locking it
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    assert first.acquire()
    assert not second.acquire()
    first.release()


def test_what_is_no_lock_is_not_overwritten(tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "x.lock"
    precious.write_text("precious")
    lock = FileLock(str(path))
    ways = (
        lambda: path.symlink_to(precious),
        lambda: path.symlink_to(tmp_path / "not yet there"),
        lambda: path.hardlink_to(precious),
        lambda: path.write_text("my own list of versions"),
        lambda: os.mkfifo(path),
    )
    for make in ways:
        make()
        with pytest.raises(FailedPreconditionError, match=r"must be free, but '.*x.lock' is (a link|another file)"):
            lock.acquire()
        lock.release()
        assert os.path.lexists(path)
        path.unlink()
    assert precious.read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["precious"]
