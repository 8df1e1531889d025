from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import raydist as rd
from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.dataset import Dataset
from raydist.dataset.base import graphs
from raydist.pipelines.elements.spec import TensorSpec


def test_every_iter_is_an_epoch_counted_from_zero_and_not_pickled() -> None:
    dataset = Dataset.range(20).shuffle(20, seed=1)
    epochs = [[int(x) for x in dataset] for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    copied = pickle.loads(pickle.dumps(dataset))
    assert [[int(x) for x in copied] for _ in range(3)] == epochs


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


def test_a_name_is_shown_and_changes_nothing_else(tmp_path: Path) -> None:
    plain = Dataset.range(20).shuffle(5, seed=1).map(lambda x: x + 1).batch(3)
    called = Dataset.range(20, name="numbers").shuffle(5, seed=1, name="mixed").map(lambda x: x + 1, name="next")
    called = called.batch(3, name="threes")
    iterator = iter(plain)
    assert next(iterator).shape == (3,)
    resumed = iter(called)
    resumed.load_state_dict(iterator.state_dict())
    assert [x.tolist() for x in resumed] == [x.tolist() for x in iterator]
    text = called.explain()
    assert 'shuffle-1: shuffle(5, seed=1) "mixed"' in text
    assert '"threes"' in text.partition("as optimised")[2]
    assert any('"next"' in stage.label for stage in resumed.stats().stages)
    assert pickle.loads(pickle.dumps(called))._op.given_name == called._op.given_name == "threes"
    for name in (None, "a"):
        snapshot = Dataset.range(3, name=name).map(lambda x: x + 1, name=name).snapshot(str(tmp_path), name=name)
        assert [int(x) for x in snapshot] == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 1


def test_what_only_tf_data_has_names_the_way_here() -> None:
    for name, instead in (("make_one_shot_iterator", r"iter\(dataset\)"), ("output_types", "element_spec")):
        with pytest.raises(AttributeError, match=f"'Dataset' object has no attribute '{name}'.*{instead}"):
            getattr(Dataset.range(3), name)
    with pytest.raises(AttributeError, match=r"no attribute 'no_such_thing'\.$"):
        _ = Dataset.range(3).no_such_thing  # type: ignore[attr-defined]  # the point of this test
    assert [int(x) for x in copy.copy(Dataset.range(2))] == [0, 1]


def test_bad_arguments() -> None:
    numbers: Any = Dataset.range(4)
    wrong = InvalidArgumentError
    for method in ("batch", "padded_batch", "rebatch", "window"):
        for size in (1.5, "3", True):
            with pytest.raises(wrong, match=r"(batch_size|size) must be a whole number, got "):
                getattr(numbers, method)(size)
    for method in ("shuffle", "repeat", "take", "skip", "enumerate", "assert_cardinality"):
        with pytest.raises(wrong, match="must be a whole number, got 2.5"):
            getattr(numbers, method)(2.5)
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: numbers.batch(2, deterministic="no"), TypeError, "deterministic must be a bool or None, got 'no'"),
        (lambda: numbers.batch(2, num_parallel_calls=0), wrong, "must be >= 1, AUTOTUNE or None, got 0"),
        (lambda: numbers.batch(2, name=3), TypeError, "name must be a str or None, got 3"),
        (lambda: numbers.apply(lambda ds: 3), TypeError, "must return a Dataset, got 3"),
        (lambda: numbers.reduce(0, lambda total, x: 0.5, name="total"), TypeError, "The state of total"),
        (lambda: graphs([numbers, cast(Any, 3)], "choose"), TypeError, "choose takes datasets, got 3"),
        (lambda: rd.TFRecordDataset(["x"], cast(Any, "BZIP")), wrong, "must be None, 'GZIP' or 'ZLIB', got 'BZIP'"),
        (lambda: rd.TFRecordDataset(["x"], None, 0), wrong, "num_parallel_reads must be >= 1, AUTOTUNE or None, got 0"),
        (lambda: rd.TFRecordDataset([]), wrong, "must name at least one file"),
        (lambda: rd.TFRecordDataset(cast(Any, 3)), SpecError, "must be a str, bytes or os.PathLike, got 3"),
        (lambda: rd.TFRecordDataset(cast(Any, [3])), TypeError, "A file name must be"),
    ]
    for call, kind, message in calls:
        with pytest.raises(kind, match=message):
            call()


def test_methods_are_documented_with_an_example() -> None:
    named = [(name, member) for name, member in inspect.getmembers(Dataset, inspect.isroutine) if name[0] != "_"]
    assert len(named) > 50
    assert [name for name, method in named if not method.__doc__ or ">>>" not in method.__doc__] == []


def test_the_single_element() -> None:
    assert Dataset.range(3).batch(3).get_single_element().tolist() == [0, 1, 2]
    assert Dataset.from_tensors({"a": "x"}).get_single_element() == {"a": "x"}
    with pytest.raises(InvalidArgumentError, match="get_single_element needs .* one element, got one without any"):
        Dataset.range(0).get_single_element()
    with pytest.raises(InvalidArgumentError, match="only needs a dataset of one element, got more: <Dataset range"):
        Dataset.range(2).get_single_element(name="only")
    with pytest.raises(ZeroDivisionError):
        Dataset.range(1).map(lambda x: 1 // int(x)).get_single_element()


def test_global_shuffle_of_a_map_style_torch_dataset() -> None:
    samples = [(index * index, str(index)) for index in range(100)]
    dataset = Dataset.from_torch(samples).global_shuffle(seed=3)
    assert (dataset.cardinality(), dataset.element_spec) == (100, Dataset.from_torch(samples).element_spec)
    first, second = ([(int(x), text) for x, text in dataset] for _ in range(2))
    assert sorted(first) == sorted(second) == samples
    assert len({tuple(first), tuple(second), tuple(samples)}) == 3
    iterator = iter(Dataset.from_torch(samples).global_shuffle(seed=3))
    for _ in range(40):
        next(iterator)
    resumed = iter(dataset)
    resumed.load_state_dict(iterator.state_dict())
    assert [text for _, text in resumed] == [text for _, text in first[40:]]


def test_stats_are_of_the_iteration_begun_last_and_explain_shows_what_ran() -> None:
    dataset = Dataset.range(10).map(lambda x: x, num_parallel_calls=2).batch(2)
    assert dataset.stats().stages == ()
    before = dataset.explain()
    first = iter(dataset)
    next(first)
    assert 1 <= dataset.stats().elements < 5
    list(dataset)
    assert dataset.stats().elements == 5
    assert first.stats().elements < 5
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


def test_building_and_reading_numpy_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from raydist.dataset import Dataset; "
        "print(sum(Dataset.range(4).map(lambda x: x + 1).batch(2).as_numpy_iterator()).tolist()); "
        "print([m for m in ('torch', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["[4, 6]", "[]"]


def test_limits_are_settings(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": "' + "x" * 600_000 + '"}\n')
    readers: list[Any] = [
        lambda **options: rd.TextLineDataset(path, **options),
        lambda **options: rd.Dataset.from_json(path, **options),
        lambda **options: rd.Dataset.from_csv(path, column_names=["a"], **options),
    ]
    for read in readers[:2]:
        assert len(list(read())) == 1
    for read in readers:
        with pytest.raises(rd.DataLossError, match="at most 1000 bytes.*Raise max_line_bytes"):
            list(read(max_line_bytes=1000))
        with pytest.raises(rd.InvalidArgumentError, match="max_line_bytes must be >= 1"):
            read(max_line_bytes=0)


def test_a_generator_described_by_types_and_shapes() -> None:
    cases: list[tuple[Any, Any, TensorSpec]] = [
        ("int64", (), TensorSpec((), "int64")),
        (torch.int64, None, TensorSpec(None, "int64")),
        (np.int64, torch.Size([]), TensorSpec((), "int64")),
    ]
    for types, shapes, spec in cases:
        ds = Dataset.from_generator(range, args=[3], output_types=types, output_shapes=shapes)
        assert ds.element_spec == spec
        assert [x.tolist() for x in ds.batch(2)] == [[0, 1], [2]]

    def pairs() -> Any:
        yield {"x": [1.0, 2.0], "y": (1, "a")}
        yield {"x": [3.0], "y": (2, "b")}

    nest = {"x": "float32", "y": ("int32", str)}
    ds = Dataset.from_generator(pairs, output_types=nest, output_shapes={"x": (None,), "y": ((), ())})
    assert ds.element_spec == {"x": TensorSpec((None,)), "y": (TensorSpec((), "int32"), TensorSpec((), "U"))}
    assert [len(element["x"]) for element in ds] == [2, 1]
    unknown = Dataset.from_generator(pairs, output_types=nest)
    assert unknown.element_spec["x"] == TensorSpec(None)
    assert [x.shape for x in unknown.map(lambda e: e["x"]).padded_batch(2)] == [(2, 2)]


def test_types_and_shapes_that_do_not_fit() -> None:
    spec, wrong, pair = TensorSpec((), "int64"), InvalidArgumentError, ("int64", "int64")
    cases: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (wrong, "output_signature, or output_types with output_shapes, got both", (spec,), {"output_types": "int64"}),
        (wrong, r"a nest like the element, \('\*', '\*'\)", (), {"output_types": pair, "output_shapes": ((),)}),
        (wrong, "output_types must be a nest of dtypes.* got 'words'", (), {"output_types": "words"}),
        (wrong, "got 'int64' and 3", (), {"output_types": "int64", "output_shapes": 3}),
        (SpecError, r"of rd.TensorSpec, got a leaf torch.int64. Dtypes alone: output_types=", (torch.int64,), {}),
        (SpecError, "needs output_signature", (), {"output_shapes": ()}),
    ]
    for kind, message, args, given in cases:
        with pytest.raises(kind, match=message):
            Dataset.from_generator(range, *args, **given)
