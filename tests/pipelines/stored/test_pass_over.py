from __future__ import annotations

from pathlib import Path

import pytest

from raydist.dataset import Dataset
from raydist.errors import FailedPreconditionError
from raydist.options import Options
from raydist.pipelines.elements.items import count_items
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.producers import BorderIterator
from raydist.pipelines.engine.resume import read_items
from raydist.pipelines.run.plan import open_iterator
from raydist.pipelines.stored.containers import Container
from raydist.pipelines.stored.pass_over import StoredPass, StoredPassSettings
from raydist.pipelines.stored.store import Recorder, Store


def numbers(size: int) -> OpIterator:
    op = Dataset.range(size)._op
    return open_iterator(op, seed=0, epoch=0, options=Options(), executor=InlineExecutor())


def one_pass(store: Store, size: int, *, seed: int = 1, waits_for_nobody: bool = False) -> BorderIterator:
    settings = StoredPassSettings(store, lambda: numbers(size), seed, "cache", waits_for_nobody)
    return BorderIterator(StoredPass(settings))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "x"), Container.of("arrow", None))


def test_the_first_pass_reads_the_input_and_the_next_one_what_was_kept(store: Store) -> None:
    assert count_items(read_items(one_pass(store, 5), 100)) == 5
    assert count_items(read_items(one_pass(store, 0), 100)) == 5


def test_a_busy_store_is_an_error_once_or_is_passed_by(store: Store) -> None:
    recorder = Recorder(store, "other")
    recorder.open()
    refused = one_pass(store, 5)
    with pytest.raises(FailedPreconditionError, match="Only one iterator at a time can fill cache"):
        refused.next_block(1)
    with pytest.raises(StopIteration):
        refused.next_block(1)
    assert count_items(read_items(one_pass(store, 5, waits_for_nobody=True), 100)) == 5
    recorder.close()
    assert store.find() is None


def test_an_input_that_has_become_shorter(store: Store) -> None:
    first = one_pass(store, 5)
    read_items(first, 4)
    state = first.state_dict()
    first.close()
    resumed = one_pass(store, 3)
    resumed.load_state_dict(state)
    with pytest.raises(FailedPreconditionError, match="it ended 1 elements earlier"):
        resumed.next_block(1)
    assert store.find() is None
