"""What AUTOTUNE costs where it cannot help: light pipelines with it and without: `python -m benchmarks.autotune`."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import raydist as rd


@dataclass(frozen=True)
class Scene:
    """Where a pipeline reads, and how it is written.

    Attributes:
        folder: Holds `numbers.parquet`, and `lines-0.txt` and so on.
        calls: For every `num_parallel_calls`: AUTOTUNE, or None for those who leave it out.
        rows: Multiplies the elements.
    """

    folder: Path
    calls: int | None
    rows: float

    def count(self, elements: int) -> int:
        """So many elements in a whole run, fewer in a smoke run."""
        return max(8, int(self.rows * elements))

    def text_files(self) -> rd.Dataset:
        names = sorted(str(path) for path in self.folder.glob("lines-*.txt"))
        return rd.Dataset.from_tensor_slices(names)


def write_files(folder: Path, rows: int = 1_000_000) -> None:
    numbers = np.arange(rows)
    table = pa.table({"a": numbers, "b": numbers * 0.5, "c": numbers % 7})
    pq.write_table(table, folder / "numbers.parquet", row_group_size=max(1, rows // 20))
    for file in range(8):
        lines = [f"line {line} of file {file}\n" for line in range(rows // 125)]
        (folder / f"lines-{file}.txt").write_text("".join(lines))


def numbers(scene: Scene) -> rd.Dataset:
    return rd.Dataset.range(scene.count(200_000))


def mapped(scene: Scene) -> rd.Dataset:
    return rd.Dataset.range(scene.count(100_000)).map(lambda x: x + 1, num_parallel_calls=scene.calls)


def images(scene: Scene) -> rd.Dataset:
    pixels = np.zeros((scene.count(20_000), 28, 28), np.uint8)
    normal = rd.Dataset.from_tensor_slices(pixels).map(lambda x: x / np.float32(255), num_parallel_calls=scene.calls)
    return normal.batch(64)


def windows(scene: Scene) -> rd.Dataset:
    fives = rd.Dataset.range(scene.count(20_000)).window(5, shift=1, drop_remainder=True)
    return fives.flat_map(lambda w: w.batch(5)).batch(64)


def interleave(scene: Scene) -> rd.Dataset:
    def short(start: Any) -> rd.Dataset:
        return rd.Dataset.range(start, start + 2_000)

    return rd.Dataset.range(scene.count(60)).interleave(short, num_parallel_calls=scene.calls)


def parquet(scene: Scene) -> rd.Dataset:
    return rd.Dataset.from_parquet(str(scene.folder / "numbers.parquet")).take(scene.count(1_000_000)).batch(1_000)


def filtered(scene: Scene) -> rd.Dataset:
    return rd.Dataset.range(scene.count(100_000)).filter(lambda x: x % 2 == 0)


def shuffled(scene: Scene) -> rd.Dataset:
    return rd.Dataset.range(scene.count(1_000_000)).shuffle(10_000).batch(100)


def batch_map(scene: Scene) -> rd.Dataset:
    rows = np.zeros((scene.count(60_000), 64), np.float32)
    return rd.Dataset.from_tensor_slices(rows).batch(64).map(lambda x: x * 2, num_parallel_calls=scene.calls)


def zipped(scene: Scene) -> rd.Dataset:
    squares = rd.Dataset.range(scene.count(60_000)).map(lambda x: x * x, num_parallel_calls=scene.calls)
    return rd.Dataset.zip(rd.Dataset.range(scene.count(60_000)), squares).batch(32)


def padded(scene: Scene) -> rd.Dataset:
    lists = rd.Dataset.range(scene.count(20_000)).map(lambda n: np.zeros(n % 10), num_parallel_calls=scene.calls)
    return lists.padded_batch(32)


def flat_map(scene: Scene) -> rd.Dataset:
    return rd.Dataset.range(scene.count(3_000)).flat_map(lambda n: rd.Dataset.range(n % 50)).batch(32)


def text_lines(scene: Scene) -> rd.Dataset:
    lines = scene.text_files().interleave(rd.TextLineDataset, num_parallel_calls=scene.calls)
    return lines.map(len, num_parallel_calls=scene.calls).batch(64)


PIPELINES: tuple[Callable[[Scene], rd.Dataset], ...] = (
    *(numbers, mapped, images, windows, interleave, parquet, filtered),
    *(shuffled, batch_map, zipped, padded, flat_map, text_lines),
)


def seconds_of_a_pass(dataset: rd.Dataset) -> float:
    began = time.perf_counter()
    for _ in dataset.as_numpy_iterator():
        pass
    return time.perf_counter() - began


@dataclass(frozen=True)
class Comparison:
    """Passes of one pipeline in turns.

    Attributes:
        name: Of the pipeline.
        plain_s: Seconds of each pass without AUTOTUNE.
        tuned_s: And with it.
    """

    name: str
    plain_s: list[float]
    tuned_s: list[float]

    def __str__(self) -> str:
        ratio = statistics.median(plain / tuned for plain, tuned in zip(self.plain_s, self.tuned_s, strict=True))
        plain_ms, tuned_ms = (1000 * statistics.median(passes) for passes in (self.plain_s, self.tuned_s))
        return f"| {self.name} | {plain_ms:.1f} | {tuned_ms:.1f} | {ratio:.2f} |"


def compare(make: Callable[[Scene], rd.Dataset], folder: Path, *, rows: float, repeat: int) -> Comparison:
    """Passes of one pipeline: without, with, with, without, and so on. The first of each is not counted."""
    plain = make(Scene(folder, None, rows))
    tuned = make(Scene(folder, rd.AUTOTUNE, rows)).prefetch(rd.AUTOTUNE)
    found = Comparison(make.__name__, [], [])
    for number in range(repeat + 1):
        pair = [(plain, found.plain_s), (tuned, found.tuned_s)]
        for dataset, passes in pair if number % 2 else reversed(pair):
            passes.append(seconds_of_a_pass(dataset))
    return Comparison(found.name, found.plain_s[1:], found.tuned_s[1:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autotune", description="The price of AUTOTUNE.")
    parser.add_argument("--smoke", action="store_true", help="few elements, once: to see that they run")
    parser.add_argument("--repeat", type=int, default=15, help="pairs of passes")
    parser.add_argument("--only", nargs="*", help="names of pipelines", default=[])
    args = parser.parse_args()
    rows, repeat = (0.001, 1) if args.smoke else (1.0, args.repeat)
    print("| pipeline | ms without AUTOTUNE | ms with it | how many times as fast |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name), 8_000 if args.smoke else 1_000_000)
        for make in PIPELINES:
            if not args.only or make.__name__ in args.only:
                print(compare(make, Path(name), rows=rows, repeat=repeat), flush=True)


if __name__ == "__main__":
    main()
