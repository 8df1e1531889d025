from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from raydist.core.errors import FailedPreconditionError
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.probe import probe_spec


def test_the_first_element_tells() -> None:
    assert probe_spec(Dataset.range(3).map(lambda x: {"a": x, "b": "t"})._op) == {
        "a": TensorSpec((), "int64"),
        "b": TensorSpec((), "U"),
    }


def test_no_first_element() -> None:
    empty = Dataset.range(3).filter(lambda x: False).map(abs)
    with pytest.raises(FailedPreconditionError, match=r"map\(abs\) is found by running it.*output_spec="):
        probe_spec(empty._op)


def test_the_functions_own_error_comes_out() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        probe_spec(Dataset.range(3).map(lambda x: 1 // int(x))._op)
    assert "element 0 of its input" in caught.value.__notes__[0]


def test_dimensions_in_which_the_first_three_differ_are_none() -> None:
    calls: list[int] = []

    def grow(x: np.int64) -> dict[str, Any]:
        calls.append(int(x))
        return {"rows": np.zeros((2, x)), "same": np.zeros(3), "rank": np.zeros((1,) * int(x))}

    dataset = Dataset.range(9).map(grow)
    assert dataset.element_spec == {
        "rows": TensorSpec((2, None), "float64"),
        "same": TensorSpec((3,), "float64"),
        "rank": TensorSpec(None, "float64"),
    }
    assert calls == [0, 1, 2]
    assert dataset.batch(1).element_spec["rows"] == TensorSpec((None, 2, None), "float64")


def test_later_elements_may_differ_and_fail() -> None:
    def odd(x: np.int64) -> Any:
        if x == 2:
            raise ValueError("only two")
        return np.zeros(3 if x < 5 else 7)

    dataset = Dataset.range(8).map(odd)
    assert dataset.element_spec == TensorSpec((3,), "float64")
    assert [len(x) for x in dataset.ignore_errors()] == [3, 3, 3, 3, 7, 7, 7]
    mixed = Dataset.range(3).map(lambda x: np.zeros(2) if x < 2 else "text")
    assert mixed.element_spec == TensorSpec((2,), "float64")


def test_slow_functions_are_called_once() -> None:
    calls: list[int] = []

    def slow(x: np.int64) -> Any:
        calls.append(int(x))
        time.sleep(0.25)
        return x

    assert Dataset.range(9).map(slow).element_spec == TensorSpec((), "int64")
    assert calls == [0]
