from __future__ import annotations

import numpy as np
import pytest

from raydist.dataset import Dataset
from raydist.options import Options


def test_the_three_views() -> None:
    dataset = Dataset.from_tensor_slices(np.zeros((9, 2))).shuffle(3, seed=1).map(abs, num_parallel_calls=1).skip(0)
    lines = dataset.map(lambda x: x, num_parallel_calls=4).batch(2).explain().splitlines()
    assert lines[0] == "as written:"
    assert lines[1] == "  batch-5: batch(2)"
    assert "          shuffle-1: shuffle(3, seed=1)" in lines
    changed = next(number for number, line in enumerate(lines) if line.startswith("as optimised (noop_elimination, "))
    optimised = lines[changed : lines.index("stages:")]
    assert not any("skip" in line for line in optimised)
    assert any("gather(" in line for line in optimised)
    stages = lines[lines.index("stages:") :]
    assert "  from_tensor_slices-0+map-2: in the consumer's thread" in stages
    assert "  map-4: on up to 4 threads or workers" in stages


@pytest.mark.parametrize(
    ("options", "left_open", "three"),
    [
        (Options(), "on the iterator's executor", "on up to 3 threads or workers"),
        (Options(num_input_workers=1), "on 1 input worker", "on 1 input worker, up to 3 blocks at a time"),
        (Options(num_input_workers=4), "on 4 input workers", "on 4 input workers, up to 3 blocks at a time"),
    ],
)
def test_where_stages_will_run_with_these_options(options: Options, left_open: str, three: str) -> None:
    ds = Dataset.range(9).map(lambda x: x, num_parallel_calls=1).map(lambda x: x).map(lambda x: x, 3)
    stages = ds.with_options(options).explain().partition("stages:\n")[2].splitlines()
    assert stages[1:4] == ["  map-1: in the consumer's thread", f"  map-2: {left_open}", f"  map-3: {three}"]
