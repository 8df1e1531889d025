from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.options import Options


def test_the_seed_of_the_options_fixes_every_choice() -> None:
    def noisy(x: int, *, rng: np.random.Generator) -> float:
        return float(rng.random())

    def one(seed: int) -> list[float]:
        dataset = Dataset.range(9).shuffle(9).map(noisy).with_options(Options(seed=seed))
        return [float(x) for x in dataset]

    assert one(1) == one(1)
    assert one(1) != one(2)


def test_stats_are_of_the_iteration_begun_last() -> None:
    dataset = Dataset.range(10).batch(2)
    assert dataset.stats().stages == ()
    first = iter(dataset)
    next(first)
    assert 1 <= dataset.stats().elements < 5
    list(dataset)
    assert dataset.stats().elements == 5
    assert first.stats().elements < 5


def test_explain_shows_what_ran() -> None:
    dataset = Dataset.range(10).map(lambda x: x, num_parallel_calls=2).batch(2)
    before = dataset.explain()
    list(dataset)
    assert dataset.explain().startswith(before)
    lines = dataset.explain().removeprefix(before).strip().splitlines()
    assert lines[0] == "running:"
    assert lines[2].startswith("  map-1: on 2 threads, busy ")
    assert lines[-1].startswith("  Bottleneck: ")


def test_len_and_bool() -> None:
    assert len(Dataset.range(7)) == 7
    with pytest.raises(TypeError, match="The dataset is infinite"):
        len(Dataset.range(7).repeat())
    with pytest.raises(TypeError, match="length is unknown"):
        len(Dataset.range(7).filter(lambda x: True))
    assert bool(Dataset.range(0))


def test_cardinality_runs_nothing() -> None:
    def never(x: int) -> int:
        raise AssertionError("was run")

    dataset = Dataset.range(5).map(never)
    assert dataset.cardinality() == 5
    assert dataset.repeat().cardinality() == INFINITE_CARDINALITY
    assert dataset.filter(never).cardinality() == UNKNOWN_CARDINALITY
    assert "map" in dataset.explain()
    assert "map" in repr(dataset)


def test_elements_are_torch_tensors_of_the_same_dtype() -> None:
    dtypes = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64"]
    dataset = Dataset.from_tensor_slices({name: np.ones((2, 3), name) for name in dtypes})
    for row in dataset:
        assert {name: str(value.dtype).removeprefix("torch.") for name, value in row.items()} == {n: n for n in dtypes}
        assert all(value.shape == (3,) for value in row.values())


def test_an_element_stays_as_it_is_when_the_next_one_comes() -> None:
    first, *_ = rows = list(Dataset.range(100).map(lambda x: np.full(3, x)))
    first[:] = -1
    assert [int(row[0]) for row in rows[1:]] == list(range(1, 100))


def test_building_and_reading_numpy_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from raydist.dataset import Dataset; "
        "print(sum(Dataset.range(4).map(lambda x: x + 1).batch(2).as_numpy_iterator()).tolist()); "
        "print([m for m in ('torch', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["[4, 6]", "[]"]


def test_options_are_options() -> None:
    with pytest.raises(TypeError, match="with_options takes rd.Options, got 3"):
        Dataset.range(3).with_options(3)  # type: ignore[arg-type]  # the point of this test
