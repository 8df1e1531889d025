from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

import raydist as rd
from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.dataset.base import graphs, named


def test_every_iter_is_an_epoch_counted_from_zero_and_not_pickled() -> None:
    dataset = Dataset.range(20).shuffle(20, seed=1)
    epochs = [[int(x) for x in dataset] for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    copied = pickle.loads(pickle.dumps(dataset))
    assert [[int(x) for x in copied] for _ in range(3)] == epochs


def test_a_dataset_does_not_change() -> None:
    dataset = Dataset.range(4)
    dataset.map(lambda x: x + 1).batch(2)
    assert [int(x) for x in dataset] == [0, 1, 2, 3]


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
