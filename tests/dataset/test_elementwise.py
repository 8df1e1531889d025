from __future__ import annotations

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset


def test_apply_must_return_a_dataset() -> None:
    assert len(Dataset.range(4).apply(lambda ds: ds.take(2))) == 2
    with pytest.raises(TypeError, match="must return a Dataset, got 3"):
        Dataset.range(4).apply(lambda ds: 3)  # type: ignore[arg-type, return-value]  # the point of this test


@pytest.mark.parametrize("method", ["map", "interleave"])
def test_deterministic_is_a_choice(method: str) -> None:
    with pytest.raises(TypeError, match="deterministic must be a bool or None, got 'no'"):
        getattr(Dataset.range(4), method)(Dataset.from_tensors, deterministic="no")


def test_the_single_element() -> None:
    assert Dataset.range(3).batch(3).get_single_element().tolist() == [0, 1, 2]
    assert Dataset.from_tensors({"a": "x"}).get_single_element() == {"a": "x"}
    with pytest.raises(InvalidArgumentError, match="get_single_element needs .* one element, got one without any"):
        Dataset.range(0).get_single_element()
    with pytest.raises(InvalidArgumentError, match="only needs a dataset of one element, got more: <Dataset range"):
        Dataset.range(2).get_single_element(name="only")
    with pytest.raises(ZeroDivisionError):
        Dataset.range(1).map(lambda x: 1 // int(x)).get_single_element()


def test_errors_of_reduce_say_its_name() -> None:
    with pytest.raises(TypeError, match="The state of total"):
        Dataset.range(2).reduce(0, lambda total, x: 0.5, name="total")
