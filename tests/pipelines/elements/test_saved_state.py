from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import raydist as rd
from raydist.pipelines.elements.saved_state import counts_in, require_state, state_errors, texts_in


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"seed": -5, "at": {"next": 0, "names": ["a"], "ended": False, "none": None}, "skip": (1 << 63) - 1},
        {"at": {"left": -1}},
        {"orders": {"map-1": [0, [[1, 2]], 0, [[-1, 1]]]}},
    ],
)
def test_states(state: Any) -> None:
    assert require_state(state) is state


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"skip": -1}, r"\['skip'\] must be from 0"),
        ({"at": {"left": -2}}, r"\['left'\] must be from -1"),
        (None, "the state must be a dict, got None"),
        ([], "the state must be a dict"),
        ({"at": {"next": -1}}, r"the state's part \['at'\]\['next'\] must be from 0"),
        ({"at": [0, 1 << 80]}, r"\['at'\]\[1\] must be from 0 to .* 81 bits"),
        ({"at": [10**5000]}, "bits"),
        ({"skip": 0.5}, r"\['skip'\] must be .* got 0.5"),
        ({"skip": float("nan")}, "got nan"),
        ({"at": {1: 2}}, r"\['at'\] must have keys of text, got 1"),
        ({"at": b"x"}, "got b'x'"),
    ],
)
def test_what_is_no_state(state: Any, where: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=where):
        require_state(state)


def test_a_state_without_end() -> None:
    state: dict[str, Any] = {}
    state["at"] = state
    with pytest.raises(rd.InvalidArgumentError, match="deep"):
        require_state(state)


@pytest.mark.parametrize(("convert", "value"), [(counts_in, 1), (texts_in, "a")])
def test_values_of_one_kind(convert: Any, value: Any) -> None:
    assert convert([value, value], 2) == (value, value)
    for wrong in ([value], [value, None], "ab", None, {0: value, 1: value}):
        with pytest.raises(ValueError, match="2 values"):
            convert(wrong, 2)


def test_errors_of_other_people_stay_what_they_are() -> None:
    with pytest.raises(KeyError, match="mine"), state_errors({}):
        dict[str, int]()["mine"]  # this file is a user's
    with pytest.raises(rd.DataLossError), state_errors({}):
        raise rd.DataLossError("x")


def saved(dataset: rd.Dataset, count: int = 3) -> Any:
    iterator = dataset.as_numpy_iterator()
    for _ in range(count):
        next(iterator)
    return json.loads(json.dumps(iterator.state_dict()))


def test_the_error_says_where() -> None:
    dataset = rd.Dataset.range(20).filter(lambda x: x > 2).take(14)
    state = saved(dataset)
    del state["at"]["at"]["input"]["at"]["input"]["next"]
    iterator = dataset.as_numpy_iterator()
    iterator.load_state_dict(state)
    for _ in range(2):  # and not that it goes on somewhere
        with pytest.raises(rd.InvalidArgumentError, match=r"\['at'\]\['input'\]\['at'\]\['input'\] must") as caught:
            next(iterator)
    assert "must have an entry 'next'" in str(caught.value)
    iterator.load_state_dict(saved(dataset))
    assert len(list(iterator)) == 11


def test_a_function_may_raise_while_a_state_is_loaded() -> None:
    """A generator is read again up to the state."""

    def numbers() -> Any:
        yield from range(9)

    dataset = rd.Dataset.from_generator(numbers, output_signature=rd.TensorSpec((), np.int64))
    state = saved(dataset)
    other = rd.Dataset.from_generator(numbers, output_signature=rd.TensorSpec((), np.int64))
    iterator = other.as_numpy_iterator()
    iterator.load_state_dict(state)
    assert next(iterator) == 3
