from __future__ import annotations

from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.engine.op import merged_options


def test_operations_win_over_inputs_and_later_inputs_over_earlier() -> None:
    first = Dataset.range(2).with_options(Options(seed=1, num_input_workers=2))
    second = Dataset.range(2).with_options(Options(seed=2))
    both = Dataset.zip(first, second)
    assert merged_options(both._op) == Options(seed=2, num_input_workers=2)
    assert merged_options(both.with_options(Options(seed=3))._op).seed == 3
    assert merged_options(Dataset.range(2)._op) == Options()
