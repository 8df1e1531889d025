from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd
from raydist.core.nest import flatten
from raydist.pipelines.elements.arguments import parts_like, require_choice, whole_number


@pytest.mark.parametrize("value", [3, np.int32(3), torch.tensor(3)])
def test_whole_numbers(value: Any) -> None:
    assert whole_number("n", value) == 3
    assert type(whole_number("n", value)) is int


@pytest.mark.parametrize("value", [2.0, True, "3", None, [1]])
def test_what_is_none(value: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"batch_size must be a whole number, got "):
        rd.Dataset.range(3).batch(value)


def test_range_takes_whole_numbers_only() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="Each of start, stop and step must be a whole number, got 1.5"):
        rd.Dataset.range(1.5)  # type: ignore[arg-type]


def test_a_choice_is_a_bool_or_none() -> None:
    for choice in (True, False, None):
        require_choice(choice)
    with pytest.raises(TypeError, match="deterministic must be a bool or None, got 1"):
        require_choice(1)


def test_parts_stand_in_the_places_of_leaves() -> None:
    structure = flatten({"a": 1, "b": (2, 3)})[1]
    assert parts_like(structure, {"b": ((1, 2), None), "a": ()}, "shapes") == [(), (1, 2), None]
    assert parts_like(structure, None, "shapes") == [None] * 3
    with pytest.raises(rd.InvalidArgumentError, match=r"shapes must be a nest like the element.* where 'b'"):
        parts_like(structure, {"a": ()}, "shapes")
