"""Orders of shuffles, and the memory that they take."""

from __future__ import annotations

import itertools
import json
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raydist.core.errors import UnavailableError
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.options import AutotuneOptions, Options
from raydist.pipelines.elements.columns import StoredColumn
from raydist.pipelines.engine import shuffle_buffer
from raydist.pipelines.ops.shuffle import sources_of_outputs
from tests.contracts.op import collect, iterate
from tests.pipelines.storing_executor import InStore, StoringExecutor


def order(dataset: Dataset) -> list[int]:
    return [int(x) for x in dataset.as_numpy_iterator()]


def test_slots_of_any_size_are_told_apart() -> None:
    drawn = np.random.default_rng(0).integers(0, 5, 60)
    expected = [part.tolist() for part in sources_of_outputs(drawn)]
    for unit in (1 << 15, (1 << 16) + 1, 1 << 24, 1 << 40):
        assert [part.tolist() for part in sources_of_outputs(drawn * unit)] == expected, unit


def test_an_element_never_comes_more_than_the_buffer_early() -> None:
    for buffer_size, seed in itertools.product((2, 5, 19), range(5)):
        got = order(Dataset.range(40).shuffle(buffer_size, seed=seed))
        assert sorted(got) == list(range(40))
        assert all(element - place < buffer_size for place, element in enumerate(got)), (buffer_size, seed)
        assert got != list(range(40))


def test_sizes_at_the_borders() -> None:
    assert order(Dataset.range(9).shuffle(1)) == list(range(9))
    assert order(Dataset.range(9).shuffle(1).with_options(without_noop())) == list(range(9))
    assert sorted(order(Dataset.range(9).shuffle(UNKNOWN_CARDINALITY))) == list(range(9))
    assert order(Dataset.range(0).shuffle(3)) == []


def without_noop() -> Options:
    options = Options()
    options.optimization.noop_elimination = False
    return options


def test_every_order_is_equally_likely() -> None:
    counts = Counter(tuple(order(Dataset.range(3).shuffle(3, seed=seed))) for seed in range(1200))
    assert len(counts) == 6
    assert all(140 < count < 260 for count in counts.values())  # 200 each; five standard deviations are 65
    first = Counter(order(Dataset.range(6).shuffle(2, seed=seed))[0] for seed in range(400))
    assert set(first) == {0, 1}
    assert 150 < first[0] < 250


def test_the_table_of_seeds() -> None:
    """Orders of two datasets, two epochs each, for each kind of arguments."""
    table = {
        (4, True): [["a", "b"], ["a", "b"]],
        (4, False): [["a", "a"], ["a", "a"]],
        (None, True): [["a", "b"], ["c", "d"]],
        (None, False): [["a", "a"], ["b", "b"]],
    }
    for arguments, expected in table.items():
        names: dict[tuple[int, ...], str] = {}
        found = [
            [names.setdefault(tuple(order(dataset)), "abcd"[len(names)]) for _ in range(2)]
            for dataset in [Dataset.range(20).shuffle(20, *arguments) for _ in range(2)]
        ]
        assert found == expected, f"seed and reshuffle {arguments}"
    fixed = Dataset.range(20).shuffle(20, seed=4, reshuffle_each_iteration=False)
    assert order(fixed) == order(pickle.loads(pickle.dumps(fixed)))


def test_passes_of_a_repeat_are_epochs() -> None:
    dataset = Dataset.range(10).shuffle(10, seed=1)
    assert order(Dataset.range(10).shuffle(10, seed=1).repeat(2)) == order(dataset) + order(dataset)
    fixed = order(Dataset.range(10).shuffle(10, seed=1, reshuffle_each_iteration=False).repeat(2))
    assert fixed[:10] == fixed[10:]
    mixed = order(Dataset.range(5).repeat(4).shuffle(20, seed=2))
    assert Counter(mixed) == Counter(list(range(5)) * 4)
    assert sorted(mixed[:5]) != list(range(5)), "a repeat before it mixes passes"


def test_take_and_skip_of_one_fixed_order_divide_the_data() -> None:
    for options in (Options(), Options(seed=3)):
        mixed = Dataset.range(20).shuffle(20, reshuffle_each_iteration=False).with_options(options)
        assert sorted(order(mixed.take(5)) + order(mixed.skip(5).batch(4).unbatch())) == list(range(20))


def _kept_order(size: int) -> Dataset:
    return Dataset.range(size).shuffle(size, reshuffle_each_iteration=False)


def test_the_seed_of_an_order_that_is_kept_is_part_of_the_state() -> None:
    """The pipeline of another process, or one that a function makes anew, draws another seed."""
    makers: list[Callable[[], Dataset]] = [
        lambda: _kept_order(30),
        lambda: _kept_order(30).take(20).repeat(3),
        lambda: Dataset.range(30).shuffle(4, reshuffle_each_iteration=False).repeat(2),
        lambda: Dataset.zip(_kept_order(30), _kept_order(30)).map(lambda one, other: 100 * one + other),
        lambda: Dataset.range(6).interleave(lambda _: _kept_order(10)),
        lambda: Dataset.range(6).map(lambda _: _kept_order(10)).flat_map(lambda inner: inner),
    ]
    for number, make in enumerate(makers):
        first = make().as_numpy_iterator()
        for _ in range(13):
            next(first)
        resumed = make().as_numpy_iterator()
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        again = json.loads(json.dumps(resumed.state_dict()))
        rest = list(first)
        assert list(resumed) == rest, f"maker {number}"
        resumed.load_state_dict(again)
        assert list(resumed) == rest, f"maker {number}"


def test_rows_in_the_object_store_stay_within_the_budget() -> None:
    def read(ram_budget: int | None) -> int:
        options = Options(autotune=AutotuneOptions(ram_budget=ram_budget))
        dataset = Dataset.range(50).map(lambda x: np.full(100, x)).shuffle(20).with_options(options)
        return len(list(iterate(dataset, StoringExecutor)))

    assert read(None) == read(20 * 8) == 50  # the executor of tests says 8 bytes for each row
    with pytest.raises(UnavailableError, match=r"shuffle\(20\) must hold its elements within .*ram_budget, 0\.0 MB"):
        read(19 * 8)


def test_a_shuffle_takes_little_more_than_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle_buffer, "_COPY_BYTES", 8 * 1_000)
    living: weakref.WeakSet[StoredColumn] = weakref.WeakSet()
    made = InStore.put.__func__  # type: ignore[attr-defined]

    def put(cls: type[InStore], column: Any) -> InStore:
        stored: InStore = made(cls, column)
        living.add(stored)
        return stored

    monkeypatch.setattr(InStore, "put", classmethod(put))
    dataset = Dataset.range(150_000).map(lambda x: x * 2).shuffle(20_000, seed=3).batch(100)
    expected = [row for batch in collect(iterate(dataset)) for row in batch.tolist()]
    for spare_bytes in (0, 1 << 30):
        monkeypatch.setattr(shuffle_buffer, "_SPARE_BYTES", spare_bytes)
        found, most = [], 0
        for number, batch in enumerate(iterate(dataset, StoringExecutor)):
            found += batch.tolist()
            if number > 500:
                most = max(most, sum(stored.shape[0] for stored in living))
        assert found == expected
        assert (most < 90_000) == (spare_bytes == 0), most
