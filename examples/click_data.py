"""Tables of numbers and words for `wide_and_deep.py`: census-income, Criteo's clicks, or made up ones like those."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import raydist as rd

BUILT_IN = Path(__file__).parent / "data" / "census_income.csv"
NUM_BUCKETS = 1_000_000
"""Words of a column are numbered by hashing: no vocabulary is kept, and new words have a row from the start."""

CRITEO_NUMBERS, CRITEO_WORDS = 13, 26
CENSUS_COLUMNS = 43
CENSUS_NUMBERS = (1, 6, 17, 18, 19, 31, 40)
"""Age, wage an hour, gains, losses, dividends, persons of the employer, weeks worked. The last column is the target."""
CENSUS_LEFT_OUT = (0, 25)
"""The row's number, and how many people it stands for."""


@dataclass(frozen=True)
class Table:
    """Rows of columns.

    Attributes:
        numbers: float32 (n, columns), on a logarithmic scale.
        words: int64 (n, columns): numbers below `NUM_BUCKETS` times the columns, other ones in each column.
        targets: float32 (n,), 0 or 1.
    """

    numbers: np.ndarray
    words: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.targets)

    def rows(self, which: np.ndarray) -> Table:
        """Some of them."""
        return Table(self.numbers[which], self.words[which], self.targets[which])

    def batches(self, batch_size: int, *, shuffled: bool = False) -> rd.Dataset:
        dataset = rd.Dataset.from_tensor_slices((self.numbers, self.words, self.targets))
        return (dataset.shuffle(len(self), seed=0) if shuffled else dataset).batch(batch_size)


def read_table(file: Path) -> Table:
    """Criteo's lines (target, 13 numbers, 26 words, by tabs) or those of census-income, whole or as they are here."""
    with file.open(newline="") as lines:
        first = lines.readline()
        lines.seek(0)
        rows = list(csv.reader(lines, delimiter="\t" if "\t" in first else ",", skipinitialspace=True))
    if "\t" in first:
        numbers = [row[1 : 1 + CRITEO_NUMBERS] for row in rows]
        return make_table(numbers, [row[1 + CRITEO_NUMBERS :] for row in rows], [row[0] == "1" for row in rows])
    if rows[0][-1] == "income":
        names, *rows = rows
        where = [place for place, name in enumerate(names) if rows[0][place].isdigit()]
    else:
        where = list(CENSUS_NUMBERS)
    return census_table(rows, where)


def census_table(rows: Sequence[Sequence[str]], where: Sequence[int]) -> Table:
    """Of rows whose last column says what is earned; `where` says which columns are numbers."""
    left_out = CENSUS_LEFT_OUT if len(rows[0]) == CENSUS_COLUMNS else ()
    of_words = [place for place in range(len(rows[0]) - 1) if place not in (*where, *left_out)]
    numbers = [[row[place] for place in where] for row in rows]
    words = [[row[place].strip() for place in of_words] for row in rows]
    return make_table(numbers, words, ["50000+" in row[-1] for row in rows])


def make_table(numbers: Sequence[Sequence[str]], words: Sequence[Sequence[str]], targets: Iterable[bool]) -> Table:
    """From text; a missing number is 0."""
    values = np.array([[float(cell or 0) for cell in row] for row in numbers], np.float32)
    columns = [numbered(column, place) for place, column in enumerate(zip(*words, strict=True))]
    return Table(np.log1p(np.maximum(values, 0)), np.stack(columns, 1), np.array(list(targets), np.float32))


def numbered(column: Sequence[str], place: int) -> np.ndarray:
    """The rows of one column's words in a table that all columns share."""
    hashed = rd.text.HashBuckets(NUM_BUCKETS, salt=place)(np.array(column, object))
    return np.asarray(hashed, np.int64) + place * NUM_BUCKETS


def made_up_table(count: int) -> Table:
    """Of Criteo's shape: some words are frequent, most are rare, and a few of the columns decide."""
    draw = np.random.default_rng(0)
    ranks = (NUM_BUCKETS ** draw.random((count, CRITEO_WORDS))).astype(np.int64) - 1
    numbers = draw.exponential(size=(count, CRITEO_NUMBERS)).astype(np.float32)
    leaning = np.sin(ranks[:, :4] + 1.0).sum(1) + numbers[:, 0] - 1
    targets = draw.random(count) < 1 / (1 + np.exp(-2 * leaning))
    return Table(np.log1p(numbers), ranks + np.arange(CRITEO_WORDS) * NUM_BUCKETS, targets.astype(np.float32))
