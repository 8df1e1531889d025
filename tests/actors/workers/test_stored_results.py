"""The columns of a result that are stored, and what comes of them where they are read."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from raydist.actors.workers import mapped_columns
from raydist.actors.workers.mapped_columns import StoredColumns
from raydist.actors.workers.stored_results import store_result, with_row_ids
from raydist.core.errors import DeadlineExceededError, UnavailableError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, StageResult
from raydist.pipelines.elements.rows import items_of_rows

LARGE: dict[str, list[Any]] = {
    "dense": [np.full((10, 100), k, np.float32) for k in range(40)],
    "bytes": [bytes([k]) * 2_000 for k in range(40)],
    "text": ["ä" * (2_000 + k) for k in range(40)],
    "ragged": [np.arange(1_000 + k) for k in range(40)],
}


class Ref(str):
    """Stands for an ObjectRef."""

    __slots__ = ()

    def hex(self) -> str:
        return str(self)


def result_of(items: list[Item]) -> StageResult:
    return StageResult(tuple(items), (1,), ("",))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Stands for the object store: references are names."""
    kept: dict[str, bytes] = {}
    monkeypatch.setattr(ray, "get", lambda ref, timeout: pickle.loads(kept[ref]))
    monkeypatch.setattr(mapped_columns, "_mapped", mapped_columns._MappedResults())
    return kept


@pytest.mark.parametrize("kind", LARGE)
def test_large_columns_are_stored_and_the_others_come_with_the_answer(kind: str, store: dict[str, bytes]) -> None:
    rows = [(value, k) for k, value in enumerate(LARGE[kind])]
    answer, stored = store_result(result_of(items_of_rows(rows)))
    assert isinstance(stored, StoredColumns)
    assert len(pickle.dumps(answer)) < 10_000 < stored.num_bytes
    store["a"] = pickle.dumps(stored, protocol=5)
    (block,) = with_row_ids(pickle.loads(pickle.dumps(answer)), Ref("a")).items
    assert isinstance(block, Block)
    assert block.columns[1].tolist() == list(range(40))
    for chosen in (block.slice(3, 9), block.take(np.array([39, 0, 7]))):
        assert pickle.loads(pickle.dumps(chosen)).is_remote
        found = chosen.in_memory()
        for value, number in zip(found.columns[0], found.columns[1].tolist(), strict=True):
            assert np.array_equal(value, LARGE[kind][number])
            assert type(value) is type(LARGE[kind][number])


def test_small_results_are_not_stored() -> None:
    for rows in ([np.zeros(100)] * 3, list(range(100_000)), [b"x" * 100] * 1_000):
        result = result_of(items_of_rows(rows))
        answer, stored = store_result(result)
        assert stored is None
        assert answer is result


def test_blocks_of_one_kind_are_joined_and_errors_keep_their_places(store: dict[str, bytes]) -> None:
    blocks = [item for k in range(4) for item in items_of_rows([np.full(20_000, float(k))])]
    error = ElementError(ValueError("no"), 2)
    answer, stored = store_result(result_of([*blocks[:2], error, *blocks[2:]]))
    store["a"] = pickle.dumps(stored, protocol=5)
    first, between, last = with_row_ids(answer, Ref("a")).items
    assert between is error
    assert isinstance(first, Block)
    assert isinstance(last, Block)
    assert [block.in_memory().columns[0][:, 0].tolist() for block in (first, last)] == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (GetTimeoutError("late"), DeadlineExceededError),
        (ObjectLostError("00" * 28, None, ""), UnavailableError),
    ],
)
def test_a_result_that_cannot_be_had_is_an_error_of_the_pipeline(
    raised: Exception, expected: type[Exception], store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(ref: Any, timeout: float) -> Any:
        raise raised

    monkeypatch.setattr(ray, "get", fail)
    answer, _ = store_result(result_of(items_of_rows(LARGE["dense"])))
    (block,) = with_row_ids(answer, Ref("a")).items
    assert isinstance(block, Block)
    with pytest.raises(expected, match="A block of elements that an input worker made"):
        block.in_memory()


def test_a_result_is_mapped_once(store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    answer, stored = store_result(result_of(items_of_rows(LARGE["dense"])))
    store["a"] = pickle.dumps(stored, protocol=5)
    (block,) = with_row_ids(answer, Ref("a")).items
    assert isinstance(block, Block)
    copies = [pickle.loads(pickle.dumps(block)) for _ in range(2)]
    copies[0].in_memory()
    store.clear()
    copies[1].in_memory()
    monkeypatch.setattr(mapped_columns, "_KEPT_RESULTS", 1)
    store["b"] = pickle.dumps(stored, protocol=5)
    (other,) = with_row_ids(answer, Ref("b")).items
    assert isinstance(other, Block)
    other.in_memory()
    pickled = pickle.dumps(block)
    del block, copies
    with pytest.raises(KeyError):  # the first one was let go
        pickle.loads(pickled).in_memory()
