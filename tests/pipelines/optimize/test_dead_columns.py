from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raydist.dataset import Dataset
from raydist.options import OptimizationOptions, Options
from raydist.pipelines.engine.build import walk
from raydist.pipelines.run.plan import make_plan
from tests.pipelines.optimize.rewriting import assert_same

TABLE = pa.table({"a": np.arange(9), "b": np.arange(9) * 0.5, "c": [f"n{row}" for row in range(9)]})
ROWS = Dataset.from_arrow(TABLE)


def columns_of(dataset: Dataset) -> list[list[str]]:
    """The columns that each source gives."""
    plan = make_plan(dataset._op, Options(optimization=OptimizationOptions(late_gather=False)))
    return [sorted(node.element_spec()) for node in walk(plan.optimised) if not node.inputs]


def test_only_what_is_looked_at_is_read() -> None:
    dataset = ROWS.shuffle(4).filter(lambda row: row["b"] > 1).take(5).map(lambda row: row["a"] + 1)
    assert columns_of(dataset) == [["a", "b"]]
    assert len(assert_same(dataset, "dead_column_pruning")) == 5


def test_what_is_handed_on_whole_is_read_whole() -> None:
    def whole(row: Any) -> Any:
        return dict(row)

    for dataset in (
        ROWS.map(whole),
        ROWS.filter(lambda row: len(row) > 0).map(lambda row: row["a"]),
        ROWS.batch(2).map(lambda rows: rows["a"]),
        ROWS.map(lambda row: (row["a"], row["b"], row["c"])),
        ROWS.filter(lambda row: row["a"] > 3),
    ):
        assert columns_of(dataset) == [["a", "b", "c"]]
        assert_same(dataset, "dead_column_pruning")


def test_a_source_with_two_readers_stays() -> None:
    dataset = Dataset.zip(ROWS.map(lambda row: row["a"]), ROWS.map(lambda row: row["c"]))
    assert columns_of(dataset) == [["a", "b", "c"]]
    assert_same(dataset, "dead_column_pruning")


def test_a_missing_column_is_the_functions_error() -> None:
    items = assert_same(ROWS.map(lambda row: row["z"]).skip(0), "dead_column_pruning")
    assert all(item[0] == "KeyError" for item in items)


def write(folder: Path, table: pa.Table) -> Dataset:
    pq.write_table(table, folder / "rows.parquet", row_group_size=4)
    return Dataset.from_parquet(str(folder / "rows.parquet"))


def test_columns_of_parquet_files(tmp_path: Path) -> None:
    dataset = write(tmp_path, TABLE).shuffle(4).map(lambda row: row["b"] + row["a"])
    source = next(node for node in walk(make_plan(dataset._op, Options()).optimised) if node.name == "from_parquet")
    assert sorted(source.element_spec()) == ["a", "b"]
    assert len(assert_same(dataset, "dead_column_pruning")) == 9


def test_a_column_with_nulls_stays_because_they_are_errors(tmp_path: Path) -> None:
    names = pa.array(["a", None] + ["b"] * 7)
    dataset = write(tmp_path, TABLE.set_column(2, "c", names)).map(lambda row: row["a"])
    items = assert_same(dataset, "dead_column_pruning")
    assert [type(item) for item in items].count(tuple) == 1
