from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from raydist.dataset import Dataset
from raydist.errors import InvalidArgumentError
from raydist.nest import flatten, unflatten
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.stored.outline import outline_of, structure_of


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Example:
    image: Any
    at: Point


NEST = {"z": Example(1, Point(2, (3,))), "a": 4}


def test_structures_come_back_with_the_order_of_their_keys() -> None:
    leaves, structure = flatten(NEST)
    found = structure_of(json.loads(json.dumps(outline_of(structure))))
    assert found == structure
    assert repr(unflatten(found, leaves)) == repr(NEST)


def test_a_part_without_leaves_comes_back() -> None:
    outline = json.loads(json.dumps(outline_of(flatten_element({"x": 1, "y": None})[1])))
    assert outline == {"dict": {"x": None, "y": {"none": []}}}
    assert unflatten(structure_of(outline), [5]) == {"x": 5, "y": None}


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_saved_elements_are_of_their_classes(tmp_path: Path, form: Any) -> None:
    dataset = Dataset.range(3).map(lambda x: {"z": Example(np.ones(2) * x, Point(x, 1)), "a": x})
    dataset.save(str(tmp_path / "saved"), format=form)
    found = list(Dataset.load(str(tmp_path / "saved")).as_numpy_iterator())
    assert [list(element) for element in found] == [["z", "a"]] * 3
    assert type(found[2]["z"]) is Example
    assert found[2]["z"].at == Point(2, 1)
    assert found[2]["z"].image.tolist() == [2.0, 2.0]


def test_unknown_classes_are_made_and_nothing_is_imported() -> None:
    outline = {"namedtuple": {"b": None, "a": None}, "class": ["antigravity", "Flight.Inner"]}
    structure = structure_of(outline)
    made = unflatten(structure, [1, 2])
    assert (made.b, made.a, type(made).__name__) == (1, 2, "Inner")
    assert "antigravity" not in sys.modules
    assert structure_of(outline) == structure
    outline = {"dataclass": {"b": None, "a": None}, "class": [__name__, "Example"]}  # it has other fields now
    made = unflatten(structure_of(outline), [1, 2])
    assert (made.b, made.a) == (1, 2)
    assert not isinstance(made, Example)


@pytest.mark.parametrize(
    "outline",
    [
        {"list": []},
        {},
        {"dict": {"a": None, "b": None}, "shown": [1, 1]},
        {"namedtuple": {"not a name": None}, "class": ["m", "N"]},
        {"namedtuple": {"a": None}, "class": ["m", "not a name"]},
        {"dataclass": {"class": None}, "class": ["m", "N"]},
    ],
)
def test_what_is_no_structure(outline: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        structure_of(outline)


def test_keys_must_be_text() -> None:
    with pytest.raises(InvalidArgumentError, match="dicts with text keys can be saved"):
        outline_of(flatten({1: 2})[1])
