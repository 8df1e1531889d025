from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
from typing import Any

import pytest

from raydist.core.errors import DeadlineExceededError
from raydist.dataset.torch_dataset import SharedEpochs


def note(epochs: SharedEpochs, found: Any) -> None:
    found.put((epochs.of_pass(7), epochs.begin()))


def test_passes_are_counted_and_those_of_one_name_are_one() -> None:
    epochs = SharedEpochs()
    assert [epochs.begin(), epochs.begin()] == [0, 1]
    assert [epochs.of_pass(name) for name in (0, 5, 0, -3, 5, -3)] == [2, 3, 2, 4, 3, 4]
    assert epochs.begin() == 5


def test_many_passes() -> None:
    epochs = SharedEpochs()
    for number in range(300):
        assert epochs.of_pass(1000 + number) == epochs.of_pass(1000 + number) == number
    assert epochs.of_pass(1299 - 20) == 279


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_them(method: str) -> None:
    start = multiprocessing.get_context(method)
    epochs, found = SharedEpochs(), start.SimpleQueue()
    assert epochs.begin() == 0
    for _ in range(2):
        process = start.Process(target=note, args=(epochs, found))  # type: ignore[attr-defined]  # each method has it
        process.start()
        process.join(60)
    assert [found.get(), found.get()] == [(1, 2), (1, 3)]
    assert epochs.begin() == 4


def test_another_copy_begins_anew() -> None:
    epochs = SharedEpochs()
    epochs.begin()
    assert pickle.loads(pickle.dumps(epochs)).begin() == 0


def hold(epochs: SharedEpochs, held: Any, done: Any) -> None:
    with epochs._locked():
        held.put(True)
        done.get()


def test_the_wait_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydist.dataset.torch_dataset._LIMIT_S", 0.05)
    start = multiprocessing.get_context("fork")
    epochs, held, done = SharedEpochs(), start.SimpleQueue(), start.SimpleQueue()
    process = start.Process(target=hold, args=(epochs, held, done))
    process.start()
    held.get()
    with pytest.raises(DeadlineExceededError, match="Is one of its workers stopped"):
        epochs.begin()
    done.put(True)
    process.join(60)
    assert epochs.begin() == 0


def test_nothing_is_left_behind() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    epochs = [SharedEpochs() for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before + 5
    del epochs
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
