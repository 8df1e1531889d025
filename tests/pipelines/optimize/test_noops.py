from __future__ import annotations

from raydist.dataset import Dataset
from raydist.options import Options
from tests.pipelines.optimize.rewriting import optimised_names, rewrites_of


def test_what_changes_nothing_is_left_out() -> None:
    dataset = Dataset.range(5).take(-1).skip(0).repeat(1).shuffle(1).prefetch(0).with_options(Options()).batch(2)
    assert optimised_names(dataset) == ["range", "batch"]
    assert rewrites_of(dataset) == ("noop_elimination",)
    assert len(optimised_names(dataset, noop_elimination=False)) == 8
