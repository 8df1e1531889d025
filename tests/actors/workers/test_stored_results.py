"""Results of stages in the object store: stored columns, and results that are lost with their node."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast, final
from unittest.mock import Mock

import numpy as np
import pytest
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from raydist.actors.workers import mapped_columns, result_recipes
from raydist.actors.workers.mapped_columns import LostResultError, StoredColumns
from raydist.actors.workers.result_recipes import Recipe, StoredResult, leave_losses_to_caller, make_again
from raydist.actors.workers.stored_results import store_result, with_row_ids
from raydist.core.errors import CancelledError, DataLossError, DeadlineExceededError, UnavailableError
from raydist.pipelines.elements.blocks import Block, concat_blocks
from raydist.pipelines.elements.items import Item, StageResult
from raydist.pipelines.elements.rows import items_of_rows
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import Kernel, StageSpec, run_stage

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


def large_block(store: dict[str, bytes], name: str = "a") -> Block:
    """A block of ten rows whose values are in the store."""
    answer, stored = store_result(result_of(items_of_rows([np.ones((10, 1_000), np.float32)] * 10)))
    store[name] = pickle.dumps(stored, protocol=5)
    (block,) = with_row_ids(answer, Ref(name)).items
    assert isinstance(block, Block)
    return block


def test_large_columns_are_stored_and_the_others_come_with_the_answer(store: dict[str, bytes]) -> None:
    for kind, values in LARGE.items():
        rows = [(value, k) for k, value in enumerate(values)]
        answer, stored = store_result(result_of(items_of_rows(rows)))
        assert isinstance(stored, StoredColumns)
        assert len(pickle.dumps(answer)) < 10_000 < stored.num_bytes, kind
        store[kind] = pickle.dumps(stored, protocol=5)
        (block,) = with_row_ids(pickle.loads(pickle.dumps(answer)), Ref(kind)).items
        assert isinstance(block, Block)
        assert block.columns[1].tolist() == list(range(40))
        for chosen in (block.slice(3, 9), block.take(np.array([39, 0, 7]))):
            assert pickle.loads(pickle.dumps(chosen)).is_remote
            found = chosen.in_memory()
            for value, number in zip(found.columns[0], found.columns[1].tolist(), strict=True):
                assert np.array_equal(value, values[number]), kind
                assert type(value) is type(values[number])


def test_small_results_and_arrays_of_text_are_not_stored() -> None:
    arrays: list[Any] = [np.array(["x"] * 2_000, object)] * 40
    for rows in ([np.zeros(100)] * 3, list(range(100_000)), [b"x" * 100] * 1_000, arrays):
        result = result_of(items_of_rows(rows))
        assert store_result(result) == (result, None)


def test_a_result_that_cannot_be_had_is_an_error_of_the_pipeline(
    store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = large_block(store)
    for raised, expected in (
        (GetTimeoutError("late"), DeadlineExceededError),
        (ObjectLostError("00" * 28, None, ""), UnavailableError),
    ):
        monkeypatch.setattr(ray, "get", Mock(side_effect=raised))
        with pytest.raises(expected, match="A block of elements that an input worker made"):
            block.in_memory()


def test_a_result_is_mapped_once(store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    block = large_block(store)
    copies = [pickle.loads(pickle.dumps(block)) for _ in range(2)]
    copies[0].in_memory()
    store.clear()
    copies[1].in_memory()
    monkeypatch.setattr(mapped_columns, "_KEPT_RESULTS", 1)
    large_block(store, "b").in_memory()
    pickled = pickle.dumps(block)
    del block, copies
    with pytest.raises(KeyError):  # the first one was let go
        pickle.loads(pickled).in_memory()


# --- results that are lost with their node ----------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class AddOne(Kernel):
    """Adds one to each row."""

    label: str
    uses_index = False

    def run(self, block: Block, start: int) -> Sequence[Item]:
        rows = block.columns[0]
        return [Block(block.structure, block.specs, (rows + 1,), block.num_rows)]


@final
class Done(Pending):
    def __init__(self, pool: Pool, args: Any) -> None:
        self.pool, self.args = pool, args

    def result(self) -> StageResult:
        while True:
            try:
                return self.pool.make(*self.args)
            except LostResultError as error:
                make_again(error.result)


@final
class Pool(Executor):
    """Runs stages here and stores their results in a dictionary, as input workers and Ray do."""

    def __init__(self) -> None:
        self.store: dict[str, bytes] = {}
        self.made: list[str] = []
        self.closed = False

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        if self.closed:
            raise CancelledError("The pool is closed.")
        return Done(self, (spec, block, starts))

    def make(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> StageResult:
        arrived = pickle.loads(pickle.dumps(block))
        answer, stored = store_result(run_stage(spec, arrived.in_memory(), starts))
        ref = Ref(f"{spec.name}-{len(self.made)}")
        self.made.append(ref)
        self.store[ref] = pickle.dumps(stored, protocol=5)
        return with_row_ids(answer, ref, Recipe(self, spec, block, starts))

    def close(self) -> None:
        """Nothing was started."""

    def run(self, name: str, block: Block) -> Block:
        (made,) = self.submit(StageSpec(name, (AddOne(name),)), block, (0,)).result().items
        assert isinstance(made, Block)
        return made

    def lose_all(self) -> None:
        self.store.clear()
        for result in result_recipes._known.values():
            result._columns = None  # workers are other processes, which have not mapped it

    def get(self, ref: str, timeout: float) -> Any:
        if ref not in self.store:
            raise ObjectLostError("00" * 28, None, "")
        return pickle.loads(self.store[ref])


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    pool = Pool()
    monkeypatch.setattr(ray, "get", pool.get)
    nothing_kept = SimpleNamespace(get=lambda ref, limit_s: mapped_columns._get(ref, limit_s))
    monkeypatch.setattr(mapped_columns, "_mapped", nothing_kept)  # as in a process that has mapped nothing yet
    monkeypatch.setattr(result_recipes, "_may_ask", True)
    return pool


def rows(value: float, count: int = 8) -> Block:
    blocks = [item for item in items_of_rows([np.full(5_000, value, np.float32)] * count) if isinstance(item, Block)]
    return concat_blocks(blocks)


def firsts(block: Block) -> list[float]:
    return [float(row[0]) for row in block.in_memory().columns[0]]


def test_a_result_that_does_not_come_is_made_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    block = pool.run("a", rows(1.0))
    limits: list[float] = []

    def late_at_first(ref: str, timeout: float) -> Any:
        limits.append(timeout)
        if ref == "a-0":
            raise GetTimeoutError("late")
        return pool.get(ref, timeout)

    monkeypatch.setattr(ray, "get", late_at_first)
    assert firsts(block) == [2.0] * 8
    assert limits == [result_recipes._STALL_S] * 2


def test_what_it_was_made_from_is_made_again_too_and_once(pool: Pool) -> None:
    block = pool.run("c", pool.run("b", pool.run("a", rows(1.0))))
    gc.collect()
    assert pool.made == ["a-0", "b-1", "c-2"]
    pool.lose_all()
    assert firsts(block) == [4.0] * 8
    assert pool.made[3:] == ["a-3", "b-4", "c-5"], "what was freed"
    first = pool.run("d", rows(1.0))
    second, third = (pool.run(name, first) for name in "ef")
    blocks = [pool.run("g", rows(float(k))) for k in range(4)]
    mixed = pool.run("h", concat_blocks(blocks).take(np.array([31, 0, 9, 17, 2])))
    del blocks
    pool.lose_all()
    assert firsts(mixed) == [5.0, 2.0, 3.0, 4.0, 2.0], "rows of several results in another order"
    assert firsts(third) == firsts(second) == [3.0] * 8
    assert firsts(first) == [2.0] * 8
    assert [sum(name.startswith(each) for name in pool.made) for each in "def"] == [2, 2, 2], "what lives"


def test_what_cannot_be_made_again_says_why(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    block, other = pool.run("a", rows(1.0)), pool.run("b", rows(2.0))
    pool.lose_all()
    with monkeypatch.context() as patch:
        patch.setattr(AddOne, "run", lambda self, block, start: [block.slice(0, 4)])
        with pytest.raises(DataLossError, match="stage a was lost with its node .* a source has changed"):
            firsts(block)
    pool.closed = True
    with pytest.raises(UnavailableError, match="lost with its node and cannot be made again: The pool is closed"):
        firsts(other)
    with pytest.raises(UnavailableError, match="no longer needed"):
        make_again("gone")


def test_a_reader_asks_the_owner(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Answer(tuple[Any, ...]):
        __slots__ = ()

    def answer(lost: str) -> Answer:
        asked.append(lost)
        return Answer((make_again(lost),))

    owner = SimpleNamespace(make_again=SimpleNamespace(remote=answer))
    monkeypatch.setattr(ray, "get", lambda ref, timeout: ref if isinstance(ref, Answer) else pool.get(ref, timeout))
    monkeypatch.setattr(ray, "get_actor", lambda name: {"pipeline": owner}[name])
    monkeypatch.setattr(result_recipes, "_owner", "pipeline")
    block = pool.run("a", rows(1.0))
    pool.lose_all()
    (column,) = cast(Any, block.columns[0]).stored.values()
    reader = StoredResult(column.result.ref, owner="pipeline")
    result_recipes._known[reader.ref] = column.result  # the reader is in another process
    assert reader.columns().load(0)[0, 0] == 2.0
    assert asked == ["a-0"]
    assert reader.ref == "a-1"
    leave_losses_to_caller()
    pool.lose_all()
    with pytest.raises(LostResultError):
        StoredResult(Ref("a-1"), owner="pipeline").columns()
