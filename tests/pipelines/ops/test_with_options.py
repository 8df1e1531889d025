from __future__ import annotations

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.options import AutotuneOptions, Options


def test_later_options_win_where_they_say_something() -> None:
    dataset = Dataset.range(3).with_options(Options(seed=1, deterministic=False)).map(lambda x: x)
    dataset = dataset.with_options(Options(seed=2))
    assert (dataset.options().seed, dataset.options().deterministic) == (2, False)


def test_options_of_all_inputs_are_merged() -> None:
    first = Dataset.range(3).with_options(Options(autotune=AutotuneOptions(cpu_budget=2)))
    second = Dataset.range(3).with_options(Options(autotune=AutotuneOptions(ram_budget=9), seed=4))
    merged = Dataset.zip(first, second).options()
    assert (merged.autotune.cpu_budget, merged.autotune.ram_budget, merged.seed) == (2, 9, 4)


def test_what_was_given_is_not_changed_afterwards() -> None:
    options = Options(seed=1)
    dataset = Dataset.range(3).with_options(options)
    options.seed = 2
    assert dataset.options().seed == 1
    with pytest.raises(InvalidArgumentError, match="cannot be changed"):
        dataset.options().seed = 3
    with pytest.raises(TypeError, match=r"takes rd\.Options"):
        Dataset.range(3).with_options({"seed": 1})  # type: ignore[arg-type]  # the point of this test
