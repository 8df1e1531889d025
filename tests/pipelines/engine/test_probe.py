from __future__ import annotations

import pytest

from raydist.dataset import Dataset
from raydist.errors import FailedPreconditionError
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
