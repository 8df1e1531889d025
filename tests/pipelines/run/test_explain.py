from __future__ import annotations

import numpy as np

from raydist.dataset import Dataset


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
