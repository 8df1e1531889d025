from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset


def test_the_state_of_another_pipeline_is_refused() -> None:
    state = Dataset.range(10).batch(2).as_numpy_iterator().state_dict()
    with pytest.raises(InvalidArgumentError, match="must be of this pipeline"):
        Dataset.range(10).shuffle(2).as_numpy_iterator().load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match="must be of this pipeline"):
        Dataset.range(10).batch(2).as_numpy_iterator().load_state_dict({})


def interleaved(**settings: Any) -> Dataset:
    return Dataset.range(4).interleave(lambda x: Dataset.range(3), **{"cycle_length": 2, "block_length": 1, **settings})


def shuffled(**settings: Any) -> Dataset:
    return Dataset.range(10).shuffle(**{"buffer_size": 4, "seed": 1, **settings}).repeat(2)


@pytest.mark.parametrize(
    ("dataset", "other", "difference"),
    [
        (shuffled, {"seed": 2}, "shuffle-1 had .*seed=1, .* and has .*seed=2, .* now"),
        (shuffled, {"buffer_size": 5}, "had buffer_size=4, .* and has buffer_size=5,"),
        (shuffled, {"reshuffle_each_iteration": False}, "had .* reshuffle=True and has .* reshuffle=False now"),
        (interleaved, {"cycle_length": 3}, "interleave-1 had cycle_length=2, .* and has cycle_length=3,"),
        (interleaved, {"block_length": 2}, "had .* block_length=1 and has .* block_length=2 now"),
    ],
)
def test_the_state_of_another_order_is_refused(
    dataset: Callable[..., Dataset], other: dict[str, Any], difference: str
) -> None:
    """Elements would be missed, and others come twice."""
    saved = dataset().as_numpy_iterator()
    next(saved)
    state = json.loads(json.dumps(saved.state_dict()))
    rest = [int(x) for x in saved]
    changed = dataset(**other).as_numpy_iterator()
    with pytest.raises(InvalidArgumentError, match=difference):
        changed.load_state_dict(state)
    assert len(list(changed)) == len(rest) + 1, "it is as it was"
    state.pop("settings")  # of a state that was saved before they were part of it
    dataset(**other).as_numpy_iterator().load_state_dict(state)
