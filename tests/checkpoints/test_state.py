from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd


def test_values_are_attributes() -> None:
    progress = rd.State(epoch=0, best=float("inf"), seen={"a": [1, None, True]})
    progress.epoch += 2
    progress.new = "x"
    assert progress.state_dict() == {"epoch": 2, "best": float("inf"), "seen": {"a": [1, None, True]}, "new": "x"}
    assert repr(rd.State(a=1)) == "State(a=1)"


def test_a_state_is_taken_over() -> None:
    progress = rd.State(epoch=0, best=0.5)
    progress.load_state_dict({"epoch": 3, "more": [1]})
    assert (progress.epoch, progress.best, progress.more) == (3, 0.5, [1])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.ones(1), "'x'"),
        (np.float64(1), "'x'"),
        ((1, 2), "'x'"),
        ({"a": [1, {2: 3}]}, "'x.a.1'"),
        ([print], "'x.0'"),
        (b"", "'x'"),
        (1j, "'x'"),
    ],
)
def test_what_is_no_json_value_is_named(value: Any, named: str) -> None:
    progress = rd.State(x=0)
    with pytest.raises(rd.InvalidArgumentError, match=named):
        rd.State(x=value)
    with pytest.raises(rd.InvalidArgumentError, match=named):
        progress.x = value
    with pytest.raises(rd.InvalidArgumentError, match=named):
        progress.load_state_dict({"epoch": 1, "x": value})
    assert progress.state_dict() == {"x": 0}


def test_what_was_put_into_a_list_later_is_found() -> None:
    progress = rd.State(seen=[])
    progress.seen.append(print)
    with pytest.raises(rd.InvalidArgumentError, match="'seen.0'"):
        progress.state_dict()


def test_a_list_in_itself_is_found() -> None:
    seen: list[Any] = []
    seen.append(seen)
    with pytest.raises(rd.InvalidArgumentError, match="levels deep"):
        rd.State(seen=seen)


@pytest.mark.parametrize("name", ["_hidden", "state_dict", "load_state_dict"])
def test_names_that_are_taken(name: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=f"'{name}'"):
        rd.State(**{name: 1})


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(AttributeError, match=r"\['epoch'\], and no 'epoche'"):
        _ = rd.State(epoch=0).epoche


def test_it_can_be_copied_and_sent() -> None:
    progress = rd.State(epoch=3)
    assert pickle.loads(pickle.dumps(progress)).epoch == copy.deepcopy(progress).epoch == 3
