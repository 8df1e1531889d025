from __future__ import annotations

import numpy as np
import pytest

from raydist.dataset import Dataset
from raydist.options import OptimizationOptions, Options
from raydist.pipelines.plan import make_plan, walk
from tests.contracts.op import collect, iterate, same

ROWS = Dataset.from_tensor_slices(np.arange(24).reshape(12, 2))


def optimised_names(dataset: Dataset, **flags: bool) -> list[str]:
    plan = make_plan(dataset._op, Options(optimization=OptimizationOptions(**flags)))
    return [node.name for node in walk(plan.optimised)]


def test_what_changes_nothing_is_left_out() -> None:
    dataset = Dataset.range(5).take(-1).skip(0).repeat(1).shuffle(1).prefetch(0).with_options(Options()).batch(2)
    assert optimised_names(dataset) == ["range", "batch"]
    assert len(optimised_names(dataset, noop_elimination=False)) == 8


def test_operations_that_only_pick_move_indices() -> None:
    dataset = ROWS.shuffle(3).take(5).map(lambda x: x)
    assert optimised_names(dataset) == ["range", "shuffle", "take", "gather", "map"]
    assert optimised_names(dataset, late_gather=False) == ["from_tensor_slices", "shuffle", "take", "map"]
    assert optimised_names(ROWS.prefetch(2).shuffle(3)) == ["from_tensor_slices", "prefetch", "shuffle"]


def test_rewritten_operations_keep_their_names() -> None:
    plan = make_plan(ROWS.skip(0).shuffle(3)._op, Options())
    assert [plan.names[id(node)] for node in walk(plan.optimised)][1] == "shuffle-2"


@pytest.mark.parametrize("flag", OptimizationOptions.names())
def test_every_rewrite_leaves_the_elements(flag: str) -> None:
    def noisy(x: np.ndarray, *, rng: np.random.Generator) -> np.ndarray:
        return x + rng.integers(0, 9, 2)

    dataset = Dataset.zip(
        ROWS.shuffle(5).take(-1).repeat(2).map(noisy).filter(lambda x: x[0] % 3 > 0).map(lambda x: x + 1).skip(2),
        ROWS.skip(3).map(lambda x: x * 2).map(noisy).batch(1),
    )
    options = Options(optimization=OptimizationOptions(**{flag: False}))
    assert same(collect(iterate(dataset.with_options(options))), collect(iterate(dataset)))
