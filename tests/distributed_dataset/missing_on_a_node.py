"""Files that are there on one of two nodes only. Run in the driver process of a cluster: see
`tests/strategies/test_multi_worker.py`.

The nodes share a disk here. What a relative path leads to is another file on each: they run in folders of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import raydist as rd
from tests.several_nodes import LIMITS, cluster

READERS = (("txt", 1), ("parquet", 0), ("txt", 0), ("parquet", 1))  # formats, and input workers that read them
FILE, DATA = rd.AutoShardPolicy.FILE, rd.AutoShardPolicy.DATA
ROWS = (6, 6, 3, 0, 1, 9, 2)
MISSING = (2, 5)  # by FILE, the first is read by the first worker, the other by the second


def write_numbers(folder: Path) -> None:
    """Files of either format whose rows are numbered through."""
    for number in range(len(ROWS)):
        rows = rows_of(number)
        (folder / f"{number}.txt").write_text("".join(f"{row}\n" for row in rows))
        pq.write_table(pa.table({"row": pa.array(rows, pa.int64())}), folder / f"{number}.parquet")


def rows_of(number: int) -> range:
    return range(sum(ROWS[:number]), sum(ROWS[: number + 1]))


def numbers(kind: str) -> rd.Dataset:
    paths = [f"{number}.{kind}" for number in range(len(ROWS))]
    if kind == "txt":
        return rd.TextLineDataset(paths).map(lambda line: int(line))
    return rd.Dataset.from_parquet(paths).map(lambda columns: columns["row"])


def seen(batches: Iterator[Any]) -> tuple[Counter[int], list[rd.NotFoundError]]:
    """Rows, and errors in the place of rows."""
    rows, errors = Counter[int](), list[rd.NotFoundError]()
    while True:
        try:
            rows.update(row for part in next(batches).values for row in part.tolist())
        except StopIteration:
            return rows, errors
        except rd.NotFoundError as error:
            errors.append(error)


def a_file_that_one_node_lacks_is_named_with_that_node(root: str, num_readers: int) -> None:
    """By FILE a worker misses what is its own to read; by DATA the first reads all, and the second nothing."""
    folders = [Path(root) / name for name in ("first", "second")]
    with contextlib.ExitStack() as stack:
        for folder in folders:
            folder.mkdir()
            with contextlib.chdir(folder):
                node = cluster().add_node(num_cpus=1, resources={"apart": 1})
            stack.callback(cluster().remove_node, node)
        wanted = {"CPU": 0.01, "apart": 0.1}
        strategy = rd.MultiWorkerMirroredStrategy(2, 1, timeouts=LIMITS, resources_per_replica=wanted)
        stack.enter_context(strategy)
        homes = [Path(path) for path in strategy.local_results(strategy.run(os.getcwd))]
        assert sorted(homes) == folders
        for lacking in range(2):
            write_numbers(homes[1 - lacking])
            shutil.copytree(homes[1 - lacking], homes[lacking], dirs_exist_ok=True)
            for number, kind in itertools.product(MISSING, ("txt", "parquet")):
                (homes[lacking] / f"{number}.{kind}").unlink()
            with contextlib.chdir(homes[1 - lacking]):
                for kind, workers in READERS[:num_readers]:
                    check(strategy, kind, workers, FILE, lacking, missing=MISSING[lacking : lacking + 1])
                    check(strategy, kind, workers, DATA, lacking, missing=() if lacking else MISSING)


def check(
    strategy: rd.MultiWorkerMirroredStrategy,
    kind: str,
    workers: int,
    policy: rd.AutoShardPolicy,
    lacking: int,
    missing: Sequence[int],
) -> None:
    case = (kind, workers, policy, lacking)
    here = Counter(row for number in range(len(ROWS)) if number not in missing for row in rows_of(number))
    options = rd.InputOptions(num_input_workers=workers)
    for each, num_errors in ((numbers(kind).batch(1), len(missing)), (numbers(kind).ignore_errors().batch(4), 0)):
        dataset = each.with_options(rd.Options(auto_shard_policy=policy))
        rows, errors = seen(iter(strategy.distribute_dataset(dataset, options)))
        assert rows == here, case
        assert len(errors) == num_errors, (case, errors)
        for number, error in zip(missing, errors, strict=False):
            assert f"{number}.{kind}" in str(error), case
            node_id = strategy._launch().hosts[lacking]
            assert f"({node_id[:8]})" in "".join(error.__notes__), (case, error.__notes__)
