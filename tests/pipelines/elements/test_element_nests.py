from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raydist as rd
from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import LEAF, NOTHING, flatten, unflatten
from raydist.dataset import Dataset
from raydist.pipelines.elements.element_nests import flatten_element, map_element
from raydist.pipelines.elements.spec import TensorSpec

INT = TensorSpec((), "int64")


def pairs() -> Dataset:
    return Dataset.range(4).map(lambda x: (x, None))


def test_none_has_no_leaves() -> None:
    leaves, structure = flatten_element({"y": None, "x": (1, None)})
    assert leaves == [1]
    assert structure.children[1] == NOTHING
    assert unflatten(structure, [5]) == {"y": None, "x": (5, None)}
    assert structure.paths() == ["x.0"]
    assert pickle.loads(pickle.dumps(structure)) == structure
    assert map_element(str, (1, (None, 2))) == ("1", (None, "2"))
    assert flatten((1, None))[1].children == (LEAF, LEAF), "everywhere else None is a leaf"


@pytest.mark.parametrize(
    ("dataset", "spec", "expected"),
    [
        (lambda: Dataset.from_tensors((1, None)), (INT, None), [(1, None)]),
        (
            lambda: Dataset.from_tensor_slices({"x": [1, 2], "y": None}),
            {"x": INT, "y": None},
            [{"x": 1, "y": None}, {"x": 2, "y": None}],
        ),
        (pairs, (INT, None), [(0, None), (1, None), (2, None), (3, None)]),
        (
            lambda: pairs().map(lambda x, none: {"none": none, "x": x}).take(1),
            {"none": None, "x": INT},
            [{"none": None, "x": 0}],
        ),
        (lambda: pairs().map(lambda x, none: none is None), TensorSpec((), bool), [True] * 4),
        (lambda: pairs().filter(lambda x, none: none is None and x > 2), (INT, None), [(3, None)]),
        (lambda: pairs().batch(3), (TensorSpec((None,), "int64"), None), [([0, 1, 2], None), ([3], None)]),
        (lambda: pairs().padded_batch(4), (TensorSpec((None,), "int64"), None), [([0, 1, 2, 3], None)]),
        (lambda: pairs().batch(2).rebatch(4), (TensorSpec((None,), "int64"), None), [([0, 1, 2, 3], None)]),
        (lambda: pairs().batch(4).unbatch().skip(3), (INT, None), [(3, None)]),
        (lambda: pairs().take(1).concatenate(pairs().take(1)), (INT, None), [(0, None)] * 2),
        (lambda: pairs().enumerate().take(1), (INT, (INT, None)), [(0, (0, None))]),
        (lambda: Dataset.zip(pairs(), pairs()).take(1), ((INT, None), (INT, None)), [((0, None), (0, None))]),
        (lambda: pairs().window(4).flat_map(lambda x, none: x.batch(4)), TensorSpec((None,), "int64"), [[0, 1, 2, 3]]),
        (lambda: pairs().repeat(2).cache().shuffle(1).skip(7), (INT, None), [(3, None)]),
        (lambda: pairs().scan((0, None), lambda s, x: ((s[0] + 1, s[1]), x)).skip(3), (INT, None), [(3, None)]),
        (
            lambda: Dataset.from_generator(lambda: iter([(1, None)]), output_signature=(INT, None)),
            (INT, None),
            [(1, None)],
        ),
        (lambda: Dataset.range(1).map(lambda x: (x, None), output_spec=(INT, None)), (INT, None), [(0, None)]),
        (lambda: Dataset.range(1).map(lambda x: (None, (), {}, x)), (None, (), {}, INT), [(None, (), {}, 0)]),
        (lambda: pairs().map_batches(lambda x, none: (x * 2, none), 2).skip(3), (INT, None), [(6, None)]),
    ],
)
def test_elements_with_none(dataset: Any, spec: Any, expected: list[Any]) -> None:
    found = [map_element(lambda leaf: leaf.tolist(), element) for element in dataset()]
    assert found == expected
    assert [map_element(lambda leaf: leaf.tolist(), element) for element in dataset().as_numpy_iterator()] == expected
    assert dataset().element_spec == spec


def test_states_and_reduce() -> None:
    iterator = iter(pairs().batch(2))
    next(iterator)
    resumed = iter(pairs().batch(2))
    resumed.load_state_dict(iterator.state_dict())
    assert [(x.tolist(), none) for x, none in resumed] == [([2, 3], None)]
    assert pairs().reduce((0, None), lambda state, x: (state[0] + x[0], state[1])) == (6, None)


def test_saved_and_cached_in_files(tmp_path: Path) -> None:
    ds = Dataset.range(3).map(lambda x: {"x": x, "y": None, "z": (None, str(x))})
    ds.save(str(tmp_path / "saved"))
    loaded = Dataset.load(str(tmp_path / "saved"))
    assert loaded.element_spec == ds.element_spec
    assert list(loaded.as_numpy_iterator()) == list(ds.as_numpy_iterator())
    cached = ds.cache(str(tmp_path / "cache"))
    assert [list(cached.as_numpy_iterator()) for _ in range(2)] == [list(ds.as_numpy_iterator())] * 2


def test_none_may_stand_for_a_leaf_until_elements_are_joined() -> None:
    mixed = Dataset.range(3).map(lambda x: (x, None if x != 1 else x))
    assert [label for _, label in mixed] == [None, 1, None]
    with pytest.raises(SpecError, match=r"None\) and then \('\*', '\*'\)\. Put a value in the place of None"):
        list(mixed.batch(3))
    filled = mixed.map(lambda x, label: (x, 0 if label is None else label))
    assert [batch[1].tolist() for batch in filled.batch(3)] == [[0, 1, 0]]


def test_elements_keep_one_structure() -> None:
    iterator = iter(Dataset.range(3).map(lambda x: (x, x) if x == 1 else x))
    assert next(iterator) == 0
    with pytest.raises(SpecError, match="one structure and dtype"):
        next(iterator)
    assert next(iterator) == 2
    with pytest.raises(SpecError, match="at least one leaf, got None"):
        next(iter(Dataset.range(1).map(lambda x: None)))
    with pytest.raises(InvalidArgumentError, match="at least one tensor"):
        Dataset.from_tensor_slices((None, None))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": 1, "y": 2}, "elements of the structure .*'y': None.* got .*'y': 2"),
        ({"x": None, "y": None}, "must yield elements of the structure .* got"),
        (None, "must yield"),
    ],
)
def test_generators_keep_to_their_signature(value: Any, message: str) -> None:
    signature = {"x": INT, "y": None}
    assert list(Dataset.from_generator(lambda: iter([{"x": 1, "y": None}]), signature).as_numpy_iterator()) == [
        {"x": 1, "y": None}
    ]
    with pytest.raises(SpecError, match=message):
        next(iter(Dataset.from_generator(lambda: iter([value]), signature)))
    with pytest.raises(SpecError, match="must yield TensorSpec.* at 'x'.* got None"):
        next(iter(Dataset.from_generator(lambda: iter([{"x": None, "y": 1}]), {"x": INT, "y": INT})))


def test_batches_of_one_device_have_none_too() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    batches = strategy.distribute_dataset(pairs().batch(2))
    assert batches.element_spec == (TensorSpec((None,), "int64"), None)
    sums = [strategy.run(lambda batch: (int(batch[0].sum()), batch[1]), args=(batch,)) for batch in batches]
    assert sums == [(1, None), (5, None)]


@pytest.mark.ray
def test_batches_of_replicas_have_none_too(ray_cluster: object) -> None:
    def step(batch: Any) -> Any:
        x, none = batch
        assert none is None
        return x.sum()

    with rd.MirroredStrategy(2) as strategy:
        distributed = strategy.distribute_dataset(pairs().batch(2))
        assert distributed.element_spec == (TensorSpec((None,), "int64"), None)
        totals = []
        for batch in distributed:
            assert batch[1] is None
            totals.append(int(strategy.reduce("SUM", strategy.run(step, args=(batch,)))))
    assert totals == [1, 5]
    assert np.sum(totals) == 6
