"""Stages in order: kernels on blocks, threads and their limits."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import pytest

from raydist.core.errors import CancelledError, DeadlineExceededError, FailedPreconditionError, UnavailableError
from raydist.dataset import Dataset
from raydist.options import Options, Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, IteratorState, StageResult, count_items
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.engine import prefetch_thread
from raydist.pipelines.engine.arrival_order import ArrivalOrders
from raydist.pipelines.engine.block_size import BufferSize
from raydist.pipelines.engine.budget import Budget
from raydist.pipelines.engine.executor import Executor, InlineExecutor, Pending
from raydist.pipelines.engine.kernel import Kernel, StageSpec, run_stage
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.prefetch_thread import PrefetchThread
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.run.plan import open_iterator
from tests.contracts.op import MakeExecutor, collect, is_error, iterate
from tests.pipelines.engine.toy_stages import SOURCE, ToyPool, block_of, spec_of


def test_a_window_of_blocks_is_kept_under_way() -> None:
    pool = ToyPool(3)
    dataset = Dataset.range(50).map(lambda x: x + 1)
    iterator = open_iterator(dataset._op, seed=0, epoch=0, options=Options(), executor=pool)
    assert iterator.next_block(4).rows() == [1, 2]
    assert pool.most == 3
    assert iterator.next_block(4).rows() == [3, 4]
    iterator.close()
    assert not pool.closed, "who made the executor closes it"
    pool = ToyPool(5)
    collect(iterate(Dataset.range(50).map(lambda x: x + 1, num_parallel_calls=2), lambda options: pool))
    assert pool.most == 2
    assert pool.closed


def test_a_lost_worker_loses_no_element() -> None:
    pools = iter([ToyPool(2, lose=1), ToyPool(2)])
    iterator = iterate(Dataset.range(10).map(lambda x: x).batch(5), lambda options: next(pools))
    with pytest.raises(UnavailableError):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_block_that_no_worker_can_work_on_is_an_error_per_element() -> None:
    @final
    class Broken(Pending):
        def result(self) -> StageResult:
            raise ImportError("no module named 'mine'")

    @final
    class BrokenPool(Executor):
        window = 2

        def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
            return Broken()

        def close(self) -> None:
            """Nothing to stop."""

    items = collect(iterate(Dataset.range(7).map(abs), lambda options: BrokenPool()))
    assert items == [("ImportError", "no module named 'mine'")] * 7


def test_a_kernel_that_fails_as_a_whole_is_run_row_by_row() -> None:
    @final
    class Picky(Kernel):
        label = "picky-1"
        uses_index = False

        def run(self, block: Block, start: int) -> Sequence[Item]:
            if 2 in block.columns[0]:
                raise MemoryError("too large")
            return [block]

    items = run_stage(StageSpec("stage", (Picky(),)), block_of(SOURCE), (10,)).items
    found = [item.index if isinstance(item, ElementError) else item.rows() for item in items]
    assert found == [[0], [1], 12, [3], [4], [5]]


BLOCK = block_of(SOURCE)


def test_a_stuck_function_is_an_error_after_the_limit() -> None:
    release = threading.Event()
    executor = ThreadExecutor(1, Timeouts(element_s=0.05))
    pending = executor.submit(spec_of(SOURCE.map(lambda x: release.wait(20))), BLOCK.slice(0, 1), (0,))
    with pytest.raises(DeadlineExceededError, match=r"Stage stage must finish a block of 1 elements within 0\.05 s"):
        pending.result()
    release.set()
    executor.close()


def test_closing_gives_up_what_has_not_begun() -> None:
    begun, release = threading.Event(), threading.Event()

    def blocks(x: int) -> bool:
        begun.set()
        return release.wait(20)

    executor = ThreadExecutor(1)
    first = executor.submit(spec_of(SOURCE.map(blocks)), BLOCK.slice(0, 1), (0,))
    waiting = executor.submit(spec_of(SOURCE.map(blocks)), BLOCK.slice(1, 2), (1,))
    assert begun.wait(20)
    threading.Timer(0.02, release.set).start()
    executor.close()
    assert len(first.result().items) == 1
    with pytest.raises(CancelledError, match="closed before this block was begun"):
        waiting.result()
    with pytest.raises(CancelledError, match="needs an open executor"):
        executor.submit(spec_of(SOURCE.map(blocks)), BLOCK, (0,))
    executor.close()


def test_closing_beside_who_starts_threads_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, entered, go_on = Budget(), threading.Event(), threading.Event()
    take = budget.take

    def held(wanted: int) -> int:
        entered.set()
        go_on.wait(10)
        return take(wanted)

    monkeypatch.setattr(budget, "take", held)
    executor = ThreadExecutor(0, budget=budget)
    starts = threading.Thread(target=executor.resize, args=(2,))
    starts.start()
    assert entered.wait(10)
    closes = threading.Thread(target=executor.close)
    closes.start()
    closes.join(0.2)
    go_on.set()
    for thread in (starts, closes):
        thread.join(10)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("raydist-map")]


# --- reading ahead in a thread ----------------------------------------------------------------------------------------

ROW_BYTES = 100


@final
class Source(OpIterator):
    """`count` elements of 100 bytes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.made = 0
        self.closed = False

    def next_block(self, limit: int) -> Block:
        rows = min(limit, self.count - self.made)
        if not rows:
            raise StopIteration
        self.made += rows
        return block_of_rows([np.zeros(ROW_BYTES, np.uint8)] * rows)

    def state_dict(self) -> IteratorState:
        return {"made": self.made}

    def load_state_dict(self, state: IteratorState) -> None:
        self.made = int(state["made"])

    def close(self) -> None:
        self.closed = True


def reading(source: Source, ram: Budget) -> PrefetchThread:
    meter = IterationMeters().meter("prefetch")
    ahead = PrefetchThread(source, BufferSize(64, tuned=False), ram, meter, name="prefetch-1")
    ahead.start()
    return ahead


def test_the_buffer_never_holds_more_than_the_budget_or_one_element() -> None:
    for bytes_left in (0, 150, 1000):
        ram, most = Budget(bytes_left), 0.0
        ahead = reading(Source(200), ram)
        rows = 0
        while (ready := ahead.get()) is not None:
            most = max(most, ram.limit - ram.free)
            rows += count_items(ready[0])
        assert rows == 200
        assert most <= max(bytes_left, ROW_BYTES), bytes_left
        ahead.stop()
        assert ram.free == bytes_left


def test_a_reader_that_stops_early_gives_its_memory_back() -> None:
    ram, source = Budget(10_000), Source(1 << 30)
    ahead = reading(source, ram)
    ahead.get()
    ahead.stop()
    assert (source.closed, ram.free) == (True, 10_000)


@pytest.mark.parametrize(
    ("executor", "warning"),
    [
        (lambda options: ThreadExecutor(2, Timeouts(close_s=0.2)), r"raydist-map-\d .* stage map-1@0: map-1 \("),
        (lambda options: InlineExecutor(), r"raydist-prefetch-2 .* making the input of prefetch-2"),
    ],
)
def test_a_thread_whose_function_does_not_return_is_left_behind_by_name(
    executor: MakeExecutor, warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch_thread, "CLOSE_S", 0.2)
    reached, release = threading.Event(), threading.Event()

    def stuck(x: int) -> int:
        if x == 5:
            reached.set()
            release.wait(50)
        return x

    iterator = iterate(Dataset.range(20).map(stuck).prefetch(20), executor)
    try:
        assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
        assert reached.wait(20)
        begin = time.monotonic()
        with pytest.warns(RuntimeWarning, match=f"Thread {warning}"):
            iterator.close()
        assert time.monotonic() - begin < 5.0
    finally:
        release.set()


# --- any order: every element once, also when resuming ----------------------------------------------------------------

ANY_ORDER = Options(deterministic=False)


def fails_sometimes(x: np.int64) -> tuple[Any, float]:
    return x, 1 / float(x % 7)


def rows_of(number: np.int64) -> Dataset:
    first = 10 * int(number)
    return Dataset.range(first, first + int(number)).map(lambda x: x)


DATASETS: dict[str, Dataset] = {
    "large results": Dataset.range(60).map(lambda x: np.full(1 << 17, x)),
    "map with errors": Dataset.range(60).map(fails_sometimes),
    "map behind a batch": Dataset.range(60).map(lambda x: x).batch(3).map(lambda x: x * 2),
    "stages in a row": Dataset.range(60).filter(lambda x: x % 2).map(lambda x, *, rng: x),
    "prefetch": Dataset.range(60).map(lambda x: x).prefetch(5).batch(4),
    "repeat": Dataset.range(20).shuffle(5).map(lambda x: x).repeat(3),
    "take": Dataset.range(90).map(lambda x: x).skip(3).take(50),
    "below a shuffle": Dataset.range(60).map(lambda x: x).shuffle(10).map(lambda x: x),
    "interleave": Dataset.range(7).interleave(rows_of, 3, 2, num_parallel_calls=3).batch(2).map(lambda x: x),
}


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_state_of_a_wide_window_goes_on_in_a_narrow_one(window: int) -> None:
    """The input reads all blocks again; the stage skips those that were handed out before older ones."""
    dataset = Dataset.range(60).map(lambda x: x).with_options(ANY_ORDER)
    for seed in range(8):
        got: list[Any] = []
        state: dict[str, Any] | None = None
        for pool, count in ((ToyPool(6, seed), 20), (ToyPool(window, 1), 5), (ToyPool(3, 2), 60)):
            iterator = iterate(dataset, lambda options, pool=pool: pool)  # type: ignore[misc]  # a default
            if state is not None:
                iterator.load_state_dict(state)
            got += collect(iterator, count)
            state = iterator.state_dict()
            iterator.close()
        assert sorted(int(x) for x in got) == list(range(60)), f"seed {seed}"


def flat(items: list[Any]) -> list[Any]:
    """Return all elements and errors without their batches, sorted; of large elements the first entries."""
    parts = [item[:9] if isinstance(item, np.ndarray) else [item] for item in items]
    return sorted(str(x) for part in parts for x in part)


@pytest.mark.parametrize("name", DATASETS)
def test_nothing_is_lost_or_doubled_wherever_one_stops(name: str) -> None:
    dataset = DATASETS[name].with_options(ANY_ORDER)
    pools = iter(range(10**6))

    def pool(options: Options) -> Executor:
        return ToyPool(4, next(pools))

    expected = flat(collect(iterate(DATASETS[name])))
    first = iterate(dataset, pool)
    begun: list[Any] = []
    while True:
        state = json.dumps(first.state_dict())
        assert len(state) < 3_000
        resumed = iterate(dataset, pool, epoch=99)
        resumed.load_state_dict(json.loads(state))
        assert json.dumps(resumed.state_dict()) == state
        rest = collect(resumed, 5)
        resumed.load_state_dict(json.loads(json.dumps(resumed.state_dict())))  # once more, while notes are followed
        rest += collect(resumed)
        resumed.close()
        if name == "take":  # of any 53 elements, the first three are passed over
            assert len(set(flat(begun + rest))) == 50
        else:
            assert flat(begun + rest) == expected, f"resumed after {len(begun)}"
        more = collect(first, 1)
        if not more:
            break
        begun += more
    first.close()


def test_the_order_is_another_one_where_it_may_be() -> None:
    numbers = Dataset.range(200)
    items = collect(iterate(numbers.map(lambda x: x, deterministic=False), lambda options: ToyPool(4, 1)))
    assert items != sorted(items)
    assert sorted(items) == list(range(200))
    for dataset in (
        numbers.map(lambda x: x, deterministic=True).with_options(ANY_ORDER),
        numbers.map(lambda x: x),
        numbers.map(lambda x: x).scan(0, lambda total, x: (total, x)).with_options(ANY_ORDER),  # its states reach back
    ):
        assert collect(iterate(dataset, lambda options: ToyPool(4, 1))) == list(range(200))


def test_a_slow_element_does_not_hold_back_others() -> None:
    release = threading.Event()

    def waits(x: int) -> int:
        if x == 0:
            release.wait(50)
        return x

    iterator = iterate(Dataset.range(30).map(waits, num_parallel_calls=2, deterministic=False))
    early = [int(next(iterator)) for _ in range(29)]
    release.set()
    assert sorted(early) == list(range(1, 30))
    assert int(next(iterator)) == 0
    assert collect(iterator) == []


def test_an_input_that_is_another_one_is_an_error() -> None:
    def woven(count: int) -> Dataset:  # the states of so many are too long to be saved: all are read again
        return Dataset.range(60).interleave(lambda x: Dataset.range(count).shuffle(5).map(lambda y: y), 60)

    makers: list[tuple[Callable[[int], Dataset], int]] = [
        (lambda count: Dataset.range(count).map(lambda x: x, deterministic=False), 20),
        (woven, 250),
        (lambda count: Dataset.range(count).scan(0, lambda total, x: (total + x, x)), 20),
    ]
    for of, read in makers:
        iterator, other = (iterate(of(count), lambda options: ToyPool(4, 3)) for count in (50, 2))
        assert not any(map(is_error, collect(iterator, read)))
        other.load_state_dict(iterator.state_dict())
        with pytest.raises(FailedPreconditionError, match="the same (elements )?again to resume"):
            next(other)


def test_notes_of_thousands_of_turns_fit_into_a_state() -> None:
    orders, draw = ArrivalOrders(), random.Random(0)
    order = orders.of("interleave-1@0")
    numbers = [given + draw.choice([0, 0, 0, 1, 2, 3]) for given in range(5000)]
    for given, number in enumerate(numbers):
        order.was_read(given, 1)
        order.was_given(given, number)
    notes = orders.since({"order": "interleave-1@0", "first": 0, "given": 0})
    assert len(json.dumps(notes)) < 4_000
    again = ArrivalOrders()
    again.load(notes)
    assert [again.of("interleave-1@0").number_at(given) for given in range(5000)] == numbers
