from __future__ import annotations

import numpy as np

from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.engine.build import walk
from raydist.pipelines.run.plan import make_plan
from tests.pipelines.optimize.rewriting import assert_same, optimised_names

ROWS = Dataset.from_tensor_slices(np.arange(24).reshape(12, 2))


def test_operations_that_only_pick_move_indices() -> None:
    dataset = ROWS.shuffle(3).take(5).map(lambda x: x)
    assert optimised_names(dataset) == ["range", "shuffle", "take", "gather", "map"]
    assert optimised_names(dataset, late_gather=False) == ["from_tensor_slices", "shuffle", "take", "map"]
    assert optimised_names(ROWS.prefetch(2).shuffle(3)) == ["from_tensor_slices", "prefetch", "shuffle"]
    assert_same(dataset, "late_gather")


def test_rewritten_operations_keep_their_names() -> None:
    plan = make_plan(ROWS.skip(0).shuffle(3)._op, Options())
    assert [plan.names[id(node)] for node in walk(plan.optimised)][1] == "shuffle-2"
