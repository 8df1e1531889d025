"""All rewrites together, and each of them alone, on pipelines of all kinds."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.core.errors import InvalidArgumentError, NotFoundError
from raydist.core.values import AUTOTUNE
from raydist.dataset import Dataset
from raydist.dataset.readers import FixedLengthRecordDataset, TextLineDataset
from raydist.options import OptimizationOptions, Options
from raydist.pipelines.engine.build import Plan, walk
from raydist.pipelines.engine.executor import Executor
from raydist.pipelines.engine.op_kinds import ElementwiseOp
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.optimize.file_shards import obstacle_to_files, shard_files
from raydist.pipelines.optimize.rewrites import REWRITES
from raydist.pipelines.run.plan import make_plan
from tests.contracts.op import collect, is_error, iterate, same
from tests.pipelines.random_pipelines import Pipeline, jitter, pipelines
from tests.pipelines.tables import recorder

FLAGS = OptimizationOptions.names()
LIMIT = 60


def optimised_names(dataset: Dataset, **flags: bool) -> list[str]:
    """The operations of the graph that is run, inputs first; without a prefetch unless it is asked for."""
    return [node.name for node in walk(plan_of(dataset, flags).optimised)]


def rewrites_of(dataset: Dataset, **flags: bool) -> tuple[str, ...]:
    """The settings that have changed the graph."""
    return plan_of(dataset, flags).rewrites


def plan_of(dataset: Dataset, flags: dict[str, bool]) -> Plan:
    """The plan with these settings."""
    chosen = {"inject_prefetch": False, **flags}
    return make_plan(dataset._op, Options(optimization=OptimizationOptions(**chosen)))


def items_of(dataset: Dataset, limit: int = LIMIT) -> list[Any]:
    with warnings.catch_warnings(), contextlib.closing(iterate(dataset)) as iterator:
        warnings.filterwarnings("ignore", "map_vectorization")
        return collect(iterator, limit)


def with_flags(dataset: Dataset, **flags: bool) -> Dataset:
    return dataset.with_options(Options(optimization=OptimizationOptions(**flags)))


def assert_same(dataset: Dataset, flag: str) -> list[Any]:
    """Elements and errors, spec and cardinality are the same with `flag` on and off. Returns the elements."""
    both = [with_flags(dataset, **{flag: value}) for value in (True, False)]
    on, off = [items_of(one, 200) for one in both]
    assert same(on, off), f"{flag} changes {off} to {on}"
    assert both[0].cardinality() == both[1].cardinality()
    if not all(map(is_error, on)):
        assert both[0].element_spec == both[1].element_spec
    return on


def test_what_changes_nothing_is_left_out() -> None:
    dataset = Dataset.range(5).take(-1).skip(0).repeat(1).shuffle(1).prefetch(0).with_options(Options()).batch(2)
    assert optimised_names(dataset) == ["range", "batch"]
    assert rewrites_of(dataset) == ("noop_elimination",)
    assert len(optimised_names(dataset, noop_elimination=False)) == 8


def parallelism(dataset: Dataset, on: bool) -> object:
    return plan_of(dataset, {"map_parallelization": on}).optimised.parallelism  # type: ignore[attr-defined]  # a map


def test_maps_without_a_number_run_in_order_when_it_is_off() -> None:
    numbers = Dataset.range(5)
    assert parallelism(numbers.map(abs), on=False) == 1
    assert parallelism(numbers.map(abs), on=True) is None
    assert parallelism(numbers.map(abs, num_parallel_calls=AUTOTUNE), on=False) is None
    assert parallelism(numbers.map(abs, num_parallel_calls=3), on=False) == 3
    assert_same(numbers.map(lambda x: 6 / (x - 2)), "map_parallelization")


def noisy(x: np.int64, *, rng: np.random.Generator) -> float:
    return float(x) + float(rng.random())


def bad(x: np.int64) -> int:
    return 12 // int(x % 4 - 2)


def test_a_shard_moves_before_functions_where_it_may() -> None:
    calls: list[int] = []
    dataset = Dataset.range(9).map(lambda x: x).map(recorder(calls)).shard(3, 1)
    assert optimised_names(dataset) == ["range", "shard", "map", "map"]
    assert [int(x) for x in dataset] == calls == [1, 4, 7]
    items = assert_same(Dataset.range(12).map(bad).shard(2, 0), "shard_pushdown")
    assert [type(item).__name__ for item in items] == ["int64", "tuple"] * 3, "errors stay in their shards"
    in_order = Dataset.range(9).map(abs, num_parallel_calls=1)
    for dataset in (Dataset.range(9).map(noisy), in_order, Dataset.range(9).filter(lambda x: x > 3)):
        assert optimised_names(dataset.shard(2, 1))[-1] == "shard"
        assert_same(dataset.shard(2, 1), "shard_pushdown")


ROWS = Dataset.from_tensor_slices(np.arange(24).reshape(12, 2))


def test_operations_that_only_pick_move_indices() -> None:
    dataset = ROWS.shuffle(3).take(5).map(lambda x: x)
    assert optimised_names(dataset) == ["range", "shuffle", "take", "gather", "map"]
    assert optimised_names(dataset, late_gather=False) == ["from_tensor_slices", "shuffle", "take", "map"]
    assert optimised_names(ROWS.prefetch(2).shuffle(3)) == ["from_tensor_slices", "prefetch", "shuffle"]
    assert_same(dataset, "late_gather")
    plan = make_plan(ROWS.skip(0).shuffle(3)._op, Options())
    assert [plan.names[id(node)] for node in walk(plan.optimised)][1] == "shuffle-2", "names are kept"


def test_only_where_the_buffer_holds_all() -> None:
    rows = Dataset.from_tensor_slices(np.arange(14).reshape(7, 2))
    assert optimised_names(rows.shuffle(7).repeat()) == ["range", "shuffle_and_repeat", "gather"]
    assert optimised_names(rows.shuffle(6).repeat()) == ["range", "shuffle", "repeat", "gather"]
    assert "shuffle" in optimised_names(Dataset.range(9).filter(lambda x: x > 3).shuffle(9).repeat())


def test_maps_are_vectorised_where_it_is_asked_for() -> None:
    numbers = Dataset.range(40)
    dataset = numbers.map(lambda x: x * 2 + 1).map(jitter).map(abs, num_parallel_calls=1)
    assert rewrites_of(dataset) == ()
    assert rewrites_of(dataset, map_vectorization=True) == ("map_vectorization",)
    options = Options(optimization=OptimizationOptions(map_vectorization=True))
    assert "<lambda>, vectorised)" in dataset.with_options(options).explain()
    assert optimised_names(dataset, map_vectorization=True) == ["range", "map", "map", "map"]
    assert_same(dataset, "map_vectorization")


def test_maps_before_batches() -> None:
    seen: list[int] = []
    dataset = Dataset.range(100).map(recorder(seen)).batch(10)
    op = plan_of(dataset, {}).optimised.inputs[0]
    assert isinstance(op, ElementwiseOp)
    assert op.rows_together == 10
    iterator = iterate(dataset, three_threads)
    next(iterator)
    assert sorted(seen) == list(range(len(seen)))
    assert len(seen) % 10 == 0, "blocks of threads are whole batches"
    iterator.close()
    numbers = Dataset.range(9)
    assert rewrites_of(numbers.map(abs).batch(2)) == ("map_and_batch_fusion",)
    assert rewrites_of(numbers.map(abs).skip(1).batch(2)) == ()
    assert rewrites_of(numbers.batch(2).map(abs)) == ()


def three_threads(options: Options) -> Executor:
    return ThreadExecutor(3)


def test_every_rewrite_has_a_setting_and_every_setting_a_rewrite() -> None:
    in_stages = {"map_fusion", "filter_fusion"}  # these cut stages: see `fuse`
    assert {rewrite.flag for rewrite in REWRITES} | in_stages == set(FLAGS)


@settings(max_examples=200)
@given(flag=st.sampled_from(FLAGS), pipeline=pipelines())
def test_a_setting_changes_no_element(flag: str, pipeline: Pipeline) -> None:
    on, off = [with_flags(pipeline.build(), **{flag: value}) for value in (True, False)]
    assert same(items_of(on), items_of(off))
    assert on.cardinality() == off.cardinality()


@given(pipeline=pipelines(), flags=st.fixed_dictionaries({flag: st.booleans() for flag in FLAGS}), data=st.data())
def test_all_settings_together(pipeline: Pipeline, flags: dict[str, bool], data: st.DataObject) -> None:
    chosen = with_flags(pipeline.build(), **{**flags, "map_vectorization": False})
    elements = items_of(pipeline.build())
    done = data.draw(st.integers(0, len(elements)))
    saved, resumed = iterate(chosen), iterate(chosen, epoch=5)
    assert same(collect(saved, done), elements[:done])
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert same(collect(resumed, LIMIT - done), elements[done:])
    saved.close()
    resumed.close()


def test_a_dataset_that_is_zipped_with_itself_is_read_once() -> None:
    calls: list[int] = []
    note, numbers = recorder(calls), Dataset.range(4)
    shared = numbers.map(note)
    assert [tuple(map(int, pair)) for pair in Dataset.zip(shared, shared)] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert calls == [0, 1, 2, 3]
    calls.clear()
    assert len(list(Dataset.zip(numbers.map(note), numbers.map(note)))) == 4
    assert calls == [0, 1, 2, 3], "two maps of one dataset by one function are one"
    text = Dataset.zip(numbers.take(-1), numbers).explain()
    assert "as optimised (noop_elimination, common_subgraph_elimination):\n  zip-2: zip\n    range-0" in text
    shuffled = Dataset.range(9).shuffle(4).repeat(2)
    dataset = Dataset.zip(shuffled, shuffled)
    assert optimised_names(dataset) == ["range", "shuffle", "repeat", "zip"], "one shuffle has one order"
    assert rewrites_of(dataset) == ("common_subgraph_elimination",)
    assert len(assert_same(dataset, "common_subgraph_elimination")) == 18


def test_both_parts_are_private() -> None:
    rows = Dataset.range(3).map(lambda x: np.full(2, x))
    for first, second in Dataset.zip(rows, rows).as_numpy_iterator():
        first += 10
        assert (first - 10 == second).all()
    ragged = Dataset.range(1, 4).map(np.arange)
    for first, second in Dataset.zip(ragged, ragged).as_numpy_iterator():
        first += 10
        assert second[0] == 0


def test_random_choices_and_functions_in_order_are_made_twice() -> None:
    numbers = Dataset.range(9)
    apart = [
        Dataset.zip(numbers.map(noisy), numbers.map(noisy)),
        Dataset.zip(numbers.shuffle(9), numbers.shuffle(9)),
        Dataset.zip(numbers.map(abs, num_parallel_calls=1), numbers.map(abs, num_parallel_calls=1)),
        Dataset.zip(numbers.take(3), numbers.take(4)),
        Dataset.zip(numbers, Dataset.range(8)),
    ]
    for dataset in apart:
        assert "common_subgraph_elimination" not in rewrites_of(dataset)
    in_order = numbers.map(abs, num_parallel_calls=1)
    assert rewrites_of(Dataset.zip(in_order, in_order)) == ()


# --- the files of each worker -----------------------------------------------------------------------------------------

ROWS_OF_FILES = (3, 0, 2, 5, 1)  # of each file; one is empty


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    for number, size in enumerate(ROWS_OF_FILES):
        names = [f"{number}{row}" for row in range(size)]
        (root / f"{number}.txt").write_text("".join(f"{name}\n" for name in names))
        (root / f"{number}.csv").write_text("".join(f"{name}\n" for name in ["name", *names]))
        (root / f"{number}.bin").write_bytes("".join(names).encode())
        pq.write_table(pa.table({"name": pa.array(names, pa.string())}), root / f"{number}.parquet")
    return root


def paths(folder: Path, suffix: str) -> list[str]:
    return [str(folder / f"{number}.{suffix}") for number in range(len(ROWS_OF_FILES))]


def text(row: Any) -> str:
    row = row["name"] if isinstance(row, dict) else row
    return row.decode() if isinstance(row, bytes) else str(row).zfill(2)


def rows(dataset: Dataset, num_workers: int, worker: int) -> list[str]:
    return [text(row) for row in Dataset(shard_files(dataset._op, num_workers, worker)).as_numpy_iterator()]


MAKERS: dict[str, Callable[[Path], Dataset]] = {
    "records": lambda folder: TextLineDataset(paths(folder, "txt")),
    "records of names": lambda folder: TextLineDataset(Dataset.list_files(str(folder / "*.txt"), shuffle=False)),
    "fixed": lambda folder: FixedLengthRecordDataset(paths(folder, "bin"), 2),
    "rows": lambda folder: Dataset.from_csv(paths(folder, "csv"), column_types={"name": str}),
    "pieces": lambda folder: Dataset.from_parquet(paths(folder, "parquet")),
    "flat_map": lambda folder: Dataset.from_tensor_slices(paths(folder, "txt")).flat_map(TextLineDataset),
    "what follows": lambda folder: TextLineDataset(paths(folder, "txt")).map(lambda x: x).batch(2).unbatch(),
    "counted": lambda folder: TextLineDataset(paths(folder, "txt")).assert_cardinality(sum(ROWS_OF_FILES)),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_worker_w_reads_files_w_and_every_so_many(folder: Path, maker: str) -> None:
    dataset = MAKERS[maker](folder)
    for num_workers in (1, 2, 5):
        for worker in range(num_workers):
            expected = [
                f"{n}{row}" for n in range(worker, len(ROWS_OF_FILES), num_workers) for row in range(ROWS_OF_FILES[n])
            ]
            assert rows(dataset, num_workers, worker) == expected, f"worker {worker} of {num_workers}"
    if maker not in ("fixed", "what follows", "counted"):
        with pytest.raises(InvalidArgumentError, match=r"one file for each of 6 workers.* 5 in this.*DATA.*more files"):
            shard_files(dataset._op, 6, 0)


def test_every_input_is_sharded_but_not_the_choices_between_them(folder: Path) -> None:
    lines = TextLineDataset(paths(folder, "txt"))
    both = Dataset.choose_from_datasets([lines, lines], Dataset.from_tensor_slices([0, 1]).repeat(), False)
    assert rows(both, 2, 0) == [row for row in rows(lines, 2, 0) for _ in range(2)]
    assert rows(lines.concatenate(lines), 2, 1) == rows(lines, 2, 1) * 2
    pair = Dataset(shard_files(Dataset.zip(lines, lines)._op, 2, 1))
    assert [text(a) + text(b) for a, b in pair.as_numpy_iterator()] == [row * 2 for row in rows(lines, 2, 1)]


def test_what_stands_at_two_places_keeps_one_order(folder: Path) -> None:
    names = Dataset.list_files(str(folder / "*.txt"))
    lines = names.flat_map(TextLineDataset).shuffle(9)
    for twice in (
        Dataset.zip(lines.map(lambda line: line), lines.map(lambda line: line + b"")),
        Dataset.zip(names.flat_map(TextLineDataset), TextLineDataset(names)),
    ):
        for worker in range(2):
            sharded = shard_files(twice.with_options(Options(seed=3))._op, 2, worker)
            pairs = list(Dataset(sharded).as_numpy_iterator())
            assert len(pairs) == sum(ROWS_OF_FILES[worker::2])
            assert all(first == second for first, second in pairs)


def test_fewer_files_that_only_reading_tells(folder: Path) -> None:
    names = Dataset.list_files(str(folder / "*.txt"), shuffle=False).filter(lambda name: name.endswith("0.txt"))
    dataset = TextLineDataset(names)
    assert rows(dataset, 2, 0) == ["00", "01", "02"]
    with pytest.raises(InvalidArgumentError, match="one file for each of 2 workers, but there are fewer"):
        rows(dataset, 2, 1)


def test_what_cannot_be_shared_out(folder: Path) -> None:
    lines = TextLineDataset(paths(folder, "txt"))
    for dataset, reason in (
        (Dataset.range(4).batch(2), "reads no files"),
        (Dataset.zip(lines, Dataset.range(4)), "reads no files"),
        (Dataset.range(4).flat_map(Dataset.range), "reads no files"),
        (Dataset.range(0).flat_map(Dataset.range), "reads no files"),
        (lines.unique(), "must see the elements of all files"),
        (lines.cache("somewhere"), "would keep the elements"),
        (lines.snapshot("somewhere"), "would keep the elements"),
    ):
        assert reason in str(obstacle_to_files(dataset._op)), dataset
        with pytest.raises(NotFoundError, match=rf"AutoShardPolicy\.FILE needs.*{reason}.*DATA"):
            shard_files(dataset._op, 2, 0)


def test_a_function_that_opens_a_file_itself_reads_files() -> None:
    def opened(path: Any) -> Dataset:
        with Path(str(path)).open() as lines:
            return Dataset.from_tensor_slices(lines.readlines())

    dataset = Dataset.from_tensor_slices(["nowhere.txt", "nor here.txt"]).flat_map(opened)
    assert obstacle_to_files(dataset._op) is None
