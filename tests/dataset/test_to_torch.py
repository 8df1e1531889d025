from __future__ import annotations

import gc
import multiprocessing
import os
from typing import Any

import pytest
from torch.utils.data import DataLoader

import raydist as rd
from raydist.core.errors import DeadlineExceededError
from raydist.dataset.to_torch import SharedEpochs


@pytest.mark.timeout(120)
def test_workers_share_the_elements_and_give_what_none_give_whoever_iterates() -> None:
    def shuffled() -> Any:
        return rd.Dataset.range(20).shuffle(20).with_options(rd.Options(seed=2)).to_torch()

    dataset, again = shuffled(), shuffled()
    expected = [[int(x) for x in dataset] for _ in range(4)]
    assert len({tuple(order) for order in expected}) == 4
    kept: DataLoader[Any] = DataLoader(again, batch_size=None, num_workers=2, persistent_workers=True)
    batches: DataLoader[Any] = DataLoader(again, batch_size=8)
    found = [[int(x) for x in kept], [int(x) for batch in batches for x in batch]]
    found += [[int(x) for x in again], [int(x) for x in kept]]
    assert len(batches) == 3
    del kept
    assert found == expected


def test_errors_come_from_one_worker_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_at_three(x: Any) -> Any:
        if x == 3:
            raise ValueError("three")
        return x

    dataset = rd.Dataset.range(6).map(fail_at_three).to_torch()
    found: dict[int, list[Any]] = {}
    for worker in range(2):
        info = type("Info", (), {"id": worker, "num_workers": 2, "seed": 7 + worker})
        monkeypatch.setattr("raydist.dataset.to_torch.get_worker_info", lambda info=info: info)
        elements = iter(dataset)
        items: list[Any] = []
        for _ in range(3):
            try:
                items.append(int(next(elements)))
            except ValueError:
                items.append("error")
        assert next(elements, None) is None
        found[worker] = items
    assert found == {0: [0, 2, 4], 1: [1, "error", 5]}


def note(epochs: SharedEpochs, found: Any) -> None:
    found.put((epochs.of_pass(7), epochs.begin()))


def test_passes_are_counted_and_those_of_one_name_are_one() -> None:
    epochs = SharedEpochs()
    assert [epochs.begin(), epochs.begin()] == [0, 1]
    assert [epochs.of_pass(name) for name in (0, 5, 0, -3, 5, -3)] == [2, 3, 2, 4, 3, 4]
    assert epochs.begin() == 5
    for number in range(6, 306):
        assert epochs.of_pass(1000 + number) == epochs.of_pass(1000 + number) == number
    assert epochs.of_pass(1305 - 20) == 285


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_them(method: str) -> None:
    start = multiprocessing.get_context(method)
    epochs, found = SharedEpochs(), start.SimpleQueue()
    assert epochs.begin() == 0
    process = start.Process(target=note, args=(epochs, found))  # type: ignore[attr-defined]  # each method has it
    process.start()
    process.join(60)
    assert (found.get(), epochs.of_pass(7), epochs.begin()) == ((1, 2), 1, 3)


def hold(epochs: SharedEpochs, held: Any, done: Any) -> None:
    with epochs._locked():
        held.put(True)
        done.get()


def test_the_wait_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydist.dataset.to_torch._LIMIT_S", 0.05)
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
