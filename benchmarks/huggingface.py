"""Rows a second from a directory of Hugging Face's `save_to_disk`: `python -m benchmarks.huggingface`.

`rd.load("huggingface:<directory>")` beside the package's own torch format, row by row and in batches of 64. Needs the
package `datasets`. The bar of each line is 3: rows a second of raydist must be three times those of the torch format.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import raydist as rd

BAR = 3.0


def write(folder: Path, rows: int) -> dict[str, str]:
    """Write one directory of numbers and text, and one of small images. Return their paths."""
    import datasets

    datasets.disable_progress_bars()
    draw = np.random.default_rng(0)
    tables = {
        "numbers and text": {
            **{f"x{column}": draw.normal(size=rows).astype(np.float32) for column in range(8)},
            **{"text": [f"row {row}" for row in range(rows)], "label": draw.integers(0, 10, rows)},
        },
        "images of 28 x 28": {
            "image": list(draw.integers(0, 256, (rows, 28, 28), np.uint8)),
            "label": draw.integers(0, 10, rows),
        },
    }
    shapes = {"image": datasets.Array2D((28, 28), "uint8")}
    found = {}
    for name, table in tables.items():
        dataset = datasets.Dataset.from_dict(table)
        for column in shapes.keys() & table.keys():
            dataset = dataset.cast_column(column, shapes[column])
        found[name] = str(folder / name.replace(" ", "-"))
        dataset.save_to_disk(found[name])
    return found


def of_torch_format(path: str, batch_size: int | None) -> Iterable[Any]:
    import datasets

    table: Any = datasets.load_from_disk(path).with_format("torch")
    found: Iterable[Any] = table if batch_size is None else table.iter(batch_size)
    return found


def of_raydist(path: str, batch_size: int | None) -> Iterable[Any]:
    dataset: rd.Dataset = rd.load(f"huggingface:{path}", "train")
    return dataset if batch_size is None else dataset.batch(batch_size)


def seconds(make: Callable[[], Iterable[Any]], rows: int, batch_size: int | None) -> float:
    """Return the time of one pass over all rows."""
    start = time.perf_counter()
    count = sum(1 for _ in make())
    elapsed = time.perf_counter() - start
    assert count == (rows if batch_size is None else -(-rows // batch_size)), count
    return elapsed


def measure(path: str, rows: int, batch_size: int | None, repeat: int) -> tuple[float, float]:
    """Return rows a second of the torch format and of raydist: medians of passes that take turns."""
    times: dict[Callable[[str, int | None], Iterable[Any]], list[float]] = {of_torch_format: [], of_raydist: []}
    for _ in range(repeat):
        for make, found in times.items():
            found.append(seconds(lambda make=make: make(path, batch_size), rows, batch_size))  # type: ignore[misc]
    theirs, ours = (rows / statistics.median(found) for found in times.values())
    return theirs, ours


def main(arguments: list[str] | None = None) -> bool:
    """Print a table. Return True if every line reaches the bar."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.huggingface", description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=5, help="timed passes of each")
    parser.add_argument("--smoke", action="store_true", help="few rows and one pass: to see that everything runs")
    given = parser.parse_args(arguments)
    rows, repeat = (200, 1) if given.smoke else (given.rows, given.repeat)
    reached = True
    print("| directory | elements | torch format, rows/s | raydist, rows/s | ratio | bar |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, path in write(Path(folder), rows).items():
            for batch_size in (None, 64):
                theirs, ours = measure(path, rows, batch_size, repeat)
                elements = "rows" if batch_size is None else f"batches of {batch_size}"
                print(f"| {name} | {elements} | {theirs:,.0f} | {ours:,.0f} | {ours / theirs:.1f} | {BAR:.0f} |")
                reached &= ours >= BAR * theirs
    return reached


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
