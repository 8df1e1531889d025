from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raydist as rd
from raydist.core.errors import InvalidArgumentError, NotFoundError
from raydist.dataset import Dataset
from raydist.dataset.base import graphs, named


def test_every_iter_is_an_epoch_counted_from_zero_and_not_pickled() -> None:
    dataset = Dataset.range(20).shuffle(20, seed=1)
    epochs = [[int(x) for x in dataset] for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    copied = pickle.loads(pickle.dumps(dataset))
    assert [[int(x) for x in copied] for _ in range(3)] == epochs


def test_graphs_are_those_of_datasets_alone() -> None:
    assert len(graphs([Dataset.range(1), Dataset.range(2)], "zip")) == 2
    with pytest.raises(TypeError, match="choose takes datasets, got 3"):
        graphs([Dataset.range(1), 3], "choose")  # type: ignore[list-item]  # the point of this test
    with pytest.raises(InvalidArgumentError, match="choose needs at least one dataset"):
        graphs([], "choose")


TAKES_NO_NAME = {
    # Readers of values and of other datasets' operations, as in tf.data...
    *("apply", "as_numpy_iterator", "cardinality", "choose_from_datasets", "element_spec", "load", "options", "save"),
    "sample_from_datasets",
    # ... and raydist's own.
    *("arrow_batches", "assert_cardinality", "explain", "from_arrow", "from_csv", "from_json", "from_numpy"),
    *("from_huggingface", "from_tar", "sample_by_weight"),
    *("from_parquet", "from_ray", "from_torch", "global_shuffle", "map_batches", "profile", "stats", "to_ray"),
    "to_torch",
}


def test_every_operation_of_tf_data_takes_a_name() -> None:
    methods = {name: getattr(Dataset, name) for name in dir(Dataset) if not name.startswith("_")}
    methods |= {name: getattr(rd, name) for name in ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset")}
    takers = {name for name, method in methods.items() if callable(method) and _takes_name(method)}
    assert set(methods) - takers == TAKES_NO_NAME


def _takes_name(method: Any) -> bool:
    return "name" in inspect.signature(method).parameters


def test_a_name_is_shown_and_changes_nothing_else() -> None:
    plain = Dataset.range(20).shuffle(5, seed=1).map(lambda x: x + 1).batch(3)
    called = (
        Dataset.range(20, name="numbers")
        .shuffle(5, seed=1, name="mixed")
        .map(lambda x: x + 1, name="next")
        .batch(3, name="threes")
    )
    iterator = iter(plain)
    first = next(iterator)
    resumed = iter(called)
    resumed.load_state_dict(iterator.state_dict())
    assert [x.tolist() for x in resumed] == [x.tolist() for x in iterator]
    assert first.shape == (3,)
    text = called.explain()
    assert 'shuffle-1: shuffle(5, seed=1) "mixed"' in text
    assert '"threes"' in text.partition("as optimised")[2]
    assert any('"next"' in stage.label for stage in resumed.stats().stages)
    assert called._op.given_name == "threes"
    assert pickle.loads(pickle.dumps(called))._op.given_name == "threes"


def test_a_snapshot_is_the_same_under_another_name(tmp_path: Any) -> None:
    for name in (None, "a", "b"):
        ds = Dataset.range(3, name=name).map(lambda x: x + 1, name=name).snapshot(str(tmp_path), name=name)
        assert [int(x) for x in ds] == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_name_is_text() -> None:
    with pytest.raises(TypeError, match="name must be a str or None, got 3"):
        Dataset.range(3).batch(2, name=3)  # type: ignore[arg-type]  # the point of this test
    op = Dataset.range(3)._op
    assert named(op, None) is op


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("make_one_shot_iterator", r"iter\(dataset\)"),
        ("output_types", "element_spec"),
    ],
)
def test_what_only_tf_data_has_names_the_way_here(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"'Dataset' object has no attribute '{name}'.*{instead}"):
        getattr(Dataset.range(3), name)
    with pytest.raises(AttributeError, match=r"no attribute 'no_such_thing'\.$"):
        _ = Dataset.range(3).no_such_thing  # type: ignore[attr-defined]  # the point of this test
    assert [int(x) for x in copy.copy(Dataset.range(2))] == [0, 1]


@pytest.mark.parametrize("method", ["batch", "padded_batch", "rebatch", "window"])
@pytest.mark.parametrize("size", [1.5, "3", True])
def test_sizes_are_whole_numbers(method: str, size: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"(batch_size|size) must be a whole number, got "):
        getattr(Dataset.range(4), method)(size)


def test_batch_takes_what_tf_datas_takes() -> None:
    ds = Dataset.range(5).batch(2, drop_remainder=True, num_parallel_calls=4, deterministic=False, name="pairs")
    assert [x.tolist() for x in ds] == [[0, 1], [2, 3]]
    assert len(list(Dataset.range(5).batch(2, num_parallel_calls=-1))) == 3
    with pytest.raises(InvalidArgumentError, match="num_parallel_calls must be >= 1, AUTOTUNE or None, got 0"):
        Dataset.range(5).batch(2, num_parallel_calls=0)
    with pytest.raises(TypeError, match="deterministic must be a bool or None, got 'no'"):
        Dataset.range(5).batch(2, deterministic="no")  # type: ignore[arg-type]  # the point of this test


def test_methods_are_documented_with_an_example() -> None:
    named = [(name, member) for name, member in inspect.getmembers(Dataset, inspect.isroutine) if name[0] != "_"]
    assert len(named) > 50
    assert [name for name, method in named if not method.__doc__ or ">>>" not in method.__doc__] == []


def test_apply_must_return_a_dataset() -> None:
    assert len(Dataset.range(4).apply(lambda ds: ds.take(2))) == 2
    with pytest.raises(TypeError, match="must return a Dataset, got 3"):
        Dataset.range(4).apply(lambda ds: 3)  # type: ignore[arg-type, return-value]  # the point of this test


@pytest.mark.parametrize("method", ["map", "interleave"])
def test_deterministic_is_a_choice(method: str) -> None:
    with pytest.raises(TypeError, match="deterministic must be a bool or None, got 'no'"):
        getattr(Dataset.range(4), method)(Dataset.from_tensors, deterministic="no")


def test_the_single_element() -> None:
    assert Dataset.range(3).batch(3).get_single_element().tolist() == [0, 1, 2]
    assert Dataset.from_tensors({"a": "x"}).get_single_element() == {"a": "x"}
    with pytest.raises(InvalidArgumentError, match="get_single_element needs .* one element, got one without any"):
        Dataset.range(0).get_single_element()
    with pytest.raises(InvalidArgumentError, match="only needs a dataset of one element, got more: <Dataset range"):
        Dataset.range(2).get_single_element(name="only")
    with pytest.raises(ZeroDivisionError):
        Dataset.range(1).map(lambda x: 1 // int(x)).get_single_element()


def test_errors_of_reduce_say_its_name() -> None:
    with pytest.raises(TypeError, match="The state of total"):
        Dataset.range(2).reduce(0, lambda total, x: 0.5, name="total")


def test_exporting_loads_ray_only_when_it_is_asked_for() -> None:
    code = "import sys; from raydist.dataset.storing import Exporting; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("source", ["list_files", "from_numpy", "from_parquet", "from_csv", "from_json", "load"])
def test_a_missing_file_is_an_error_at_once(source: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        getattr(Dataset, source)(str(tmp_path / "nowhere.npy"))


@pytest.mark.parametrize("method", ["shuffle", "repeat", "take", "skip", "enumerate", "assert_cardinality"])
def test_counts_are_whole_numbers(method: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a whole number, got 2.5"):
        getattr(Dataset.range(4), method)(2.5)


def test_global_shuffle_of_a_map_style_torch_dataset() -> None:
    class Squares:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> tuple[int, str]:
            return index * index, str(index)

    dataset = Dataset.from_torch(Squares()).global_shuffle(seed=3)
    assert (dataset.cardinality(), dataset.element_spec) == (100, Dataset.from_torch(Squares()).element_spec)
    first, second = ([(int(x), text) for x, text in dataset] for _ in range(2))
    expected = [(index * index, str(index)) for index in range(100)]
    assert sorted(first) == sorted(second) == expected
    assert len({tuple(first), tuple(second), tuple(expected)}) == 3
    iterator = iter(dataset)
    whole = [next(iterator) for _ in range(40)]
    resumed = iter(Dataset.from_torch(Squares()).global_shuffle(seed=3))
    resumed.load_state_dict(iterator.state_dict())
    assert sorted((int(x), text) for x, text in [*whole, *resumed]) == expected


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


def test_elements_are_torch_tensors_of_the_same_dtype() -> None:
    dtypes = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64"]
    dataset = Dataset.from_tensor_slices({name: np.ones((2, 3), name) for name in dtypes})
    for row in dataset:
        assert {name: str(value.dtype).removeprefix("torch.") for name, value in row.items()} == {n: n for n in dtypes}
        assert all(value.shape == (3,) for value in row.values())


def test_building_and_reading_numpy_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from raydist.dataset import Dataset; "
        "print(sum(Dataset.range(4).map(lambda x: x + 1).batch(2).as_numpy_iterator()).tolist()); "
        "print([m for m in ('torch', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["[4, 6]", "[]"]
