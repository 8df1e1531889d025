"""Split specs name the examples that Python slices and TensorFlow Datasets' boundaries name."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest

import raydist as rd
from raydist.datasets.rows import Rows, joined_rows
from raydist.datasets.split_specs import SplitRange, parse_split

NAMES = ("train", "test", "validation-1")


def closest(percents: int, size: int) -> int:
    """The exact share of a split, rounded to the closest number; halves to the even one."""
    return round(Fraction(percents * size, 100))


def random_boundary(draw: random.Random, size: int, unit: str) -> tuple[str, int | None]:
    """Text of a boundary, and the number that a Python slice takes for it."""
    if draw.random() < 0.25:
        return "", None
    if unit == "%":
        percents = draw.randint(-100, 100)
        return f"{percents}%", closest(percents, size)
    number = draw.randint(-size, size)
    text = f"{number:_}" if draw.random() < 0.2 else str(number)
    return text, number


def random_part(draw: random.Random, rows: dict[str, list[int]]) -> tuple[str, list[int]]:
    """A part of a spec, and the rows that it names."""
    name = draw.choice(NAMES)
    if draw.random() < 0.1:
        return name, rows[name]
    unit = draw.choice(["", "%"])
    (first, start), (last, stop) = (random_boundary(draw, len(rows[name]), unit) for _ in range(2))
    # Python reads -0 as 0; the percents of a small split may round to it.
    return f"{name}[{first}:{last}]", rows[name][start:stop]


def test_300_random_specs_are_python_slices() -> None:
    draw = random.Random(46)
    empty = sliced = 0
    for _ in range(300):
        sizes = {name: draw.choice([0, 1, 3, 7, 99, 100, 150, 1797, 10_007]) for name in NAMES}
        ends = np.cumsum([0, *sizes.values()]).tolist()
        rows = {name: list(range(start, start + sizes[name])) for name, start in zip(NAMES, ends, strict=False)}
        parts = [random_part(draw, rows) for _ in range(draw.choice([1, 1, 1, 2, 3]))]
        spec = draw.choice(["+", " + "]).join(text for text, _ in parts)
        expected = [row for _, found in parts for row in found]
        ranges = parse_split(spec, NAMES, sizes.__getitem__)
        got = [row for each in ranges for row in rows[each.split][each.start : each.stop]]
        assert got == expected, (spec, sizes)
        assert sum(map(len, ranges)) == len(expected), (spec, sizes)
        sources = {name: rd.Dataset.from_tensor_slices(np.array(rows[name], np.int64)) for name in NAMES}
        read = joined_rows([Rows(sources[each.split], each.start, each.stop) for each in ranges])
        assert [int(x) for x in read.as_numpy_iterator()] == expected, (spec, sizes)
        assert len(read) == len(expected)
        empty += not expected
        sliced += "[" in spec
    assert empty > 10
    assert sliced > 200


def test_percents_of_every_size_are_those_of_tensorflow_datasets() -> None:
    """Its boundary is int(round(percents * size / 100.)); floats decide halves, and must do so as fractions do."""
    for size in [*range(300), 1797, 50_000, 60_000, 1_281_167, 45_840_617, 10**12 + 7]:
        for percents in range(101):
            (found,) = parse_split(f"train[{percents}%:]", ["train"], {"train": size}.__getitem__)
            assert (found.start, found.stop) == (int(round(percents * size / 100.0)), size), (size, percents)
            assert found.start == closest(percents, size)


def test_pct1_dropremainder_makes_equal_percents() -> None:
    count = {"train": 1234}.__getitem__
    for percents in range(1, 101):
        ((first),) = parse_split(f"train[:{percents}%](pct1_dropremainder)", ["train"], count)
        assert first == SplitRange("train", 0, 12 * percents)
    assert parse_split("train[-3%:](pct1_dropremainder)", ["train"], count) == (SplitRange("train", 1234 - 36, 1234),)
    with pytest.raises(rd.InvalidArgumentError, match="needs a split of at least 100 examples"):
        parse_split("train[:50%](pct1_dropremainder)", ["train"], lambda _: 99)


def test_all_names_every_split_in_order() -> None:
    count = {"b": 3, "a": 2}.__getitem__
    assert parse_split("all", ["b", "a"], count) == (SplitRange("b", 0, 3), SplitRange("a", 0, 2))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("trian", "must be one of 'train', 'test', got 'trian'"),
        ("train[5]", "must be a name or a slice of it, got 'train\\[5\\]'"),
        ("train[:80%", "must be a name or a slice"),
        ("train[::2]", "must be a name or a slice"),
        ("train[a:b]", "must be a name or a slice"),
        ("train[1.5%:]", "must be a name or a slice"),
        ("train[%:]", "must be a name or a slice"),
        ("", "must be a name or a slice"),
        ("train+", "must be a name or a slice"),
        ("train[:11]", "must lie within the split's 10 examples, got 'train\\[:11\\]'"),
        ("train[-11:]", "must lie within the split's 10 examples"),
        ("train[:101%]", "Percents must be in -100 .. 100"),
        ("train[1:50%]", "must be percents, or both numbers"),
        ("train[:50%](down)", "must be rounded by one of"),
        (3, "A split must be a str"),
    ],
)
def test_wrong_specs_say_what_to_write(spec: str, problem: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=problem):
        parse_split(spec, ["train", "test"], lambda _: 10)
