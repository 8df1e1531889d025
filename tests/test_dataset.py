from __future__ import annotations

import inspect
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.spec import TensorSpec
from raydist.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY


def test_every_iter_is_an_epoch_counted_from_zero_and_not_pickled() -> None:
    dataset = Dataset.range(20).shuffle(20, seed=1)
    epochs = [[int(x) for x in dataset] for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    copied = pickle.loads(pickle.dumps(dataset))
    assert [[int(x) for x in copied] for _ in range(3)] == epochs


def test_the_seed_of_the_options_fixes_every_choice() -> None:
    def noisy(x: int, *, rng: np.random.Generator) -> float:
        return float(rng.random())

    def one(seed: int) -> list[float]:
        dataset = Dataset.range(9).shuffle(9).map(noisy).with_options(Options(seed=seed))
        return [float(x) for x in dataset]

    assert one(1) == one(1)
    assert one(1) != one(2)


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


def test_from_tensors_of_torch_is_one_element() -> None:
    dataset = Dataset.from_tensors((torch.ones(2), {"a": [1, 2, 3]}, "text"))
    assert dataset.cardinality() == 1
    assert dataset.element_spec == (TensorSpec((2,)), {"a": TensorSpec((3,), "int64")}, TensorSpec((), "U"))


def test_apply_must_return_a_dataset() -> None:
    assert len(Dataset.range(4).apply(lambda ds: ds.take(2))) == 2
    with pytest.raises(TypeError, match="must return a Dataset, got 3"):
        Dataset.range(4).apply(lambda ds: 3)  # type: ignore[arg-type, return-value]  # the point of this test


def test_a_dataset_does_not_change() -> None:
    dataset = Dataset.range(4)
    dataset.map(lambda x: x + 1).batch(2)
    assert [int(x) for x in dataset] == [0, 1, 2, 3]


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


def test_methods_are_documented_with_an_example() -> None:
    methods = [m for name, m in inspect.getmembers(Dataset, inspect.isfunction) if not name.startswith("_")]
    assert len(methods) > 15
    assert [m.__name__ for m in methods if not m.__doc__] == []
