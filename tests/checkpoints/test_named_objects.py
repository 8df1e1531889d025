from __future__ import annotations

from typing import Any

import pytest
import torch

import raydist as rd
from raydist.checkpoints.named_objects import has_state, named_objects, other_names


def test_dicts_and_lists_are_gone_through() -> None:
    a, b, c = rd.State(), torch.nn.Linear(1, 1), torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    assert named_objects({"a": a, "more": {"b": [b, (c,)], 7: a}, "none": []}) == {
        "a": a,
        "more.b.0": b,
        "more.b.1.0": c,
        "more.7": a,
    }


def test_two_objects_of_one_name() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"two are called 'x\.a\.b'"):
        named_objects({"x": {"a.b": rd.State(), "a": {"b": rd.State()}}})


def test_keys_are_names() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"got \(1, 2\) in 'x'"):
        named_objects({"x": {(1, 2): rd.State()}})


def test_a_list_in_itself() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(rd.InvalidArgumentError, match="state_dict"):
        named_objects({"x": endless})


def test_a_class_has_no_state() -> None:
    assert not has_state(torch.nn.Linear)
    assert has_state(torch.amp.GradScaler("cpu"))


def test_names_of_the_same() -> None:
    a = rd.State()
    assert other_names({"a": a, "b": rd.State(), "c": a, "d": a}) == {"c": "a", "d": "a"}
