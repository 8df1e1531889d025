from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from raydist.errors import FailedPreconditionError
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.stored.containers import Container
from raydist.pipelines.stored.store import BusyStoreError, Recorder, Store

ARROW = Container.of("arrow", None)
BLOCK = block_of_rows([1, 2, 3])


def recorded(store: Store, origin: str) -> Recorder:
    recorder = Recorder(store, origin)
    recorder.open()
    recorder.write(BLOCK)
    return recorder


def test_what_is_committed_is_found(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "x"), ARROW)
    assert store.find() is None
    recorded(store, "me").commit()
    found = store.find()
    assert found is not None
    assert (found.num_rows, found.origin) == (3, "me")
    with pytest.raises(FailedPreconditionError, match="does not exist yet"):
        Recorder(store, "you").open()
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_one_recorder_at_a_time(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "x"), ARROW)
    first = recorded(store, "first")
    with pytest.raises(BusyStoreError, match="process"):
        Recorder(store, "second").open()
    first.close()
    first.close()
    recorded(store, "second").commit()


def test_where_nothing_locks_the_first_who_finishes_wins() -> None:
    store = Store(f"memory://{uuid.uuid4().hex}/x", ARROW)
    assert store.lock() is None
    first, second = (recorded(store, origin) for origin in ("first", "second"))
    second.commit()
    first.commit()
    found = store.find()
    assert found is not None
    assert found.origin == "second"


def test_a_recorder_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    recorder = recorded(Store(str(tmp_path / "x"), ARROW), "me")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.lock"]
    del recorder
    assert list(tmp_path.iterdir()) == []
