"""Functions and sources for random pipelines. Functions have names, so that any process finds them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from tests.pipelines.sources.saved_hub_dataset import save_to_disk

_FILES = tempfile.TemporaryDirectory()
NUMBER_SPEC = TensorSpec((), np.int64)
ROWS_SPEC = TensorSpec((None,), np.int64)
BFLOAT16 = TensorSpec((), "bfloat16").dtype


def records(rows: int, *names: str) -> dict[str, Any]:
    """Columns with these names in this order."""
    columns = {"id": np.arange(rows), "weight": np.arange(rows, dtype=np.float32)}
    return {name: columns.get(name, [f"n{row % 3}" for row in range(rows)]) for name in names}


def table(rows: int) -> pa.Table:
    columns = records(rows, "id", "name", "weight")
    return pa.table({**columns, "name": pa.array(columns["name"], pa.string())})


def hub(rows: int) -> str:
    """A directory with the same rows."""
    path = Path(_FILES.name) / str(rows)
    return str(path) if path.exists() else save_to_disk(path, table(rows))


def count_up(stop: Any) -> Iterator[int]:
    yield from range(int(stop))


# Of a number, and of what can be multiplied.


def double(x: Any) -> Any:
    return x * 2


def remainder(x: Any) -> Any:
    return x % 11


def no_thirds(x: Any) -> bool:
    return bool(x % 3 != 0)


def fail_some(x: Any) -> Any:
    if x % 5 == 3:
        raise ValueError("bad element")
    return x + 1


def jitter(x: Any, *, rng: np.random.Generator) -> Any:
    return x + rng.integers(0, 3)


def beside_none(x: Any) -> Any:
    return {"x": (x, None), "none": None}


def fail_or_below_nine(x: Any) -> bool:
    return bool(fail_some(x) < 9)


def below_nine(x: Any, *rest: Any) -> bool:
    return bool(x < 9)


def parity(x: Any) -> int:
    return int(x % 2)


def failing_parity(x: Any) -> int:
    return int(fail_some(x) % 2)


def pair_of(x: Any) -> Any:
    return x, np.float32(x) / 2


def record_of(x: Any) -> Any:
    return {"id": x, "name": f"n{x % 3}", "weight": np.float32(x)}


def turned_record_of(x: Any) -> Any:
    return {"weight": np.float32(x), "id": x, "name": f"n{x % 3}"}


def small_of(x: Any) -> Any:
    return np.array([x, 0.5], BFLOAT16)


def row_of(x: Any) -> Any:
    return np.arange(x % 4)


def text_of(x: Any) -> str:
    return "t" * int(x % 6)


def running_sum(total: Any, x: Any) -> Any:
    return total + x, total + x


def never(x: Any) -> bool:
    return False


def copies(x: Any) -> Dataset:
    return Dataset.from_tensors(x).repeat(int(x % 3))


def jittered_range(x: Any) -> Dataset:
    return Dataset.range(int(x % 5)).map(jitter).shuffle(2)


def failing_range(x: Any) -> Dataset:
    return Dataset.range(int(fail_some(x) % 6)).map(fail_some)


def parts_of(x: Any) -> Any:
    return {"rest": jittered_range(fail_some(x)), "at": x}


# Of a dataset of numbers.


def jittered(dataset: Dataset) -> Dataset:
    return dataset.map(jitter).shuffle(2)


def first_or_none(dataset: Dataset) -> Any:
    return next(dataset.as_numpy_iterator(), np.int64(-1))


def added(dataset: Dataset) -> Any:
    return dataset.reduce(np.int64(0), np.add)


def itself(window: Dataset) -> Dataset:
    return window


def three_at_a_time(window: Dataset) -> Dataset:
    return window.batch(3)


def jittered_window(key: Any, window: Dataset) -> Dataset:
    return jittered(window)


def batched_pairs(x: Dataset, y: Dataset) -> Dataset:
    return Dataset.zip(x, y).batch(2)


# Of a pair of numbers, of a row of numbers or text, of a record.


def change_signs(x: Any, y: Any) -> Any:
    return -x, -y


def first_of_two(x: Any, y: Any) -> Any:
    return x


def total(row: Any) -> Any:
    return np.int64(row.astype(np.float32).sum())


def is_long(row: Any) -> bool:
    return len(row) > 1


def is_small(row: Any) -> bool:
    return bool(row[0] < 7)


def without_name(record: Any) -> Any:
    return record["id"], record["weight"]


def identifier(record: Any) -> Any:
    return record["id"]


def is_light(record: Any) -> bool:
    return bool(record["weight"] < 5)
