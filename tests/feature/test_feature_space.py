"""Transforming, adapting, saving and loading feature spaces."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.feature.adaptation import Quantiles, TermCounts
from raydist.feature.columns import FeatureBatch
from raydist.pipelines.elements.columns import object_column
from tests.feature.farmhash import fingerprint64

fc = rd.feature
NUMBERS = st.floats(-1e6, 1e6, width=32)
TEXT = st.text(max_size=5)


def one(column: Any, features: dict[str, Any]) -> Any:
    (found,) = fc.FeatureSpace([column]).transform(features).values()
    return found


# --- numbers ----------------------------------------------------------------------------------------------------------


@given(st.lists(NUMBERS, min_size=1, unique=True), st.lists(NUMBERS | st.just(float("nan")), min_size=1))
def test_buckets_are_those_of_digitize(boundaries: list[float], values: list[float]) -> None:
    column = fc.bucketized_column(fc.numeric_column("x", dtype="float64"), sorted(boundaries))
    found = one(column, {"x": np.array(values)})
    assert found[:, 0].tolist() == np.digitize(values, sorted(boundaries)).tolist()
    assert one(fc.indicator_column(column), {"x": np.array(values)}).argmax(1).tolist() == found[:, 0].tolist()


def cut(values: np.ndarray, draw: np.random.Generator) -> list[dict[str, Any]]:
    """The values in batches of any sizes."""
    places = np.sort(draw.integers(0, len(values) + 1, draw.integers(0, 6)))
    return [{"x": part} for part in np.split(values, places)]


@given(st.lists(NUMBERS, min_size=1, max_size=60), st.integers(2, 12), st.integers(0, 2**32))
def test_statistics_are_those_of_numpy_however_data_are_cut(values: list[float], count: int, seed: int) -> None:
    array = np.array([*values, np.nan])
    plain, normalized = (fc.numeric_column("x", (1,), None, "float64", fn) for fn in (None, fc.Normalization()))
    columns = [normalized, *(fc.bucketized_column(each, fc.AdaptedBoundaries(count)) for each in (plain,))]
    first, second = fc.FeatureSpace(columns).adapt(cut(array, np.random.default_rng(seed))).columns
    fitted: Any = first
    scale = 1 + np.abs(values).max()
    assert fitted.normalizer_fn.mean[0] == pytest.approx(np.mean(values), rel=1e-12, abs=1e-12 * scale)
    assert fitted.normalizer_fn.variance[0] == pytest.approx(np.var(values), rel=1e-9, abs=1e-12 * scale**2)
    quantiles = np.unique(np.quantile(values, np.arange(1, count) / count))
    different = np.unique(values)
    expected = quantiles[quantiles > different[0]].tolist() or different[1:2].tolist() or different.tolist()
    assert list(second.boundaries) == expected  # type: ignore[attr-defined]


def test_boundaries_of_normalized_numbers_are_normalized() -> None:
    age = fc.numeric_column("age", normalizer_fn=fc.Normalization())
    space = fc.FeatureSpace([age, fc.bucketized_column(age, fc.AdaptedBoundaries(2))])
    adapted: Any = space.adapt([{"age": np.array([1.0, 2.0, 3.0, 6.0])}]).columns
    assert adapted[1].boundaries == tuple(adapted[0].normalizer_fn(np.array([2.5])))
    assert adapted[1].source_column is adapted[0], "what columns share stays shared"
    nested = fc.crossed_column(["age", fc.crossed_column([space.columns[1], "age"], 5)], 9)  # type: ignore[list-item]
    (column,) = fc.FeatureSpace([nested]).adapt([{"age": np.array([1.0, 2.0, 3.0, 6.0])}]).columns
    assert column.keys[1].keys[0] == adapted[1]  # type: ignore[attr-defined]
    logs = fc.bucketized_column(fc.numeric_column("age", normalizer_fn=np.log2), fc.AdaptedBoundaries(2))
    (found,) = fc.FeatureSpace([logs]).adapt([{"age": np.array([1.0, 4.0, 16.0])}]).columns
    assert found.boundaries == (2.0,)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["random", "rising", "falling", "twice"])
def test_ranks_are_nearly_exact_and_memory_is_bounded(kind: str) -> None:
    most, fewer, count = 256, 64, 200_000
    values = np.random.default_rng(7).normal(size=count)
    values = {"random": values, "rising": np.sort(values), "falling": np.sort(values)[::-1], "twice": values.round(3)}[
        kind
    ]
    quantiles = Quantiles(fc.numeric_column("x"), most, fewer)
    for part in np.array_split(values, 1000):
        quantiles.update(FeatureBatch({"x": part}))
        quantiles._take_in()
    levels = len(quantiles._levels)
    assert sum(len(block[0]) for block in quantiles._levels) <= fewer * levels
    assert levels <= np.log2(count / (most - fewer)) + 2
    probabilities = np.arange(1, 40) / 40
    found, _ = quantiles.at(probabilities)
    ordered = np.sort(values)
    low, high = (np.searchsorted(ordered, found, side=side) / count for side in ("left", "right"))
    allowed = (levels + 1) / (2 * fewer) + 1e-9
    assert ((low - allowed <= probabilities) & (probabilities <= high + allowed)).all()


def test_shapes_and_defaults() -> None:
    column = fc.numeric_column("x", shape=[2, 3], default_value=7, normalizer_fn=fc.Normalization())
    data = np.arange(24.0).reshape(4, 2, 3)
    space = fc.FeatureSpace([column]).adapt([{"x": data[:3]}, {"x": data[3]}])  # an element among them
    fitted: Any = space.columns[0]
    assert np.allclose(fitted.normalizer_fn.mean, data.mean(0).ravel())
    assert np.allclose(space.transform({"x": data})["x"], (data - data.mean(0)) / data.std(0))
    assert rd.DenseFeatures(space).out_features == 6
    spec = fc.make_parse_example_spec([column, fc.categorical_column_with_identity("id", 3)])
    assert repr(spec["x"]) == repr(rd.FixedLenFeature((2, 3), "float32", 7))
    assert spec["id"] == rd.VarLenFeature("int64")
    with pytest.raises(rd.InvalidArgumentError, match="agree on the feature 'id'"):
        fc.make_parse_example_spec([fc.numeric_column("id"), fc.categorical_column_with_identity("id", 3)])


# --- ids --------------------------------------------------------------------------------------------------------------


@given(st.lists(TEXT, unique=True, min_size=1), st.lists(st.lists(TEXT, max_size=4), min_size=1), st.integers(0, 3))
def test_ids_are_those_of_a_dict(terms: list[str], rows: list[list[str]], buckets: int) -> None:
    column = fc.categorical_column_with_vocabulary_list("x", terms, num_oov_buckets=buckets)

    def id_of(text: str) -> int:
        if text in terms or not buckets:
            return terms.index(text) if text in terms else -1
        return len(terms) + fingerprint64(text.encode()) % buckets

    width = max(1, *map(len, rows))
    expected = [[*map(id_of, row), *[-1] * (width - len(row))] for row in rows]
    ragged = object_column([np.array(row, object) for row in rows])
    assert one(column, {"x": ragged}).tolist() == expected
    as_bytes = object_column([np.array([text.encode() for text in row], object) for row in rows])
    assert one(column, {"x": as_bytes}).tolist() == expected


@given(st.lists(st.lists(st.integers(-3, 9), max_size=4), min_size=1))
def test_ragged_and_sparse_features_are_the_same(rows: list[list[int]]) -> None:
    flat = np.array([value for row in rows for value in row], np.int64)
    splits = np.cumsum([0, *map(len, rows)])
    places = [[number, place] for number, row in enumerate(rows) for place in range(len(row))]
    column = fc.categorical_column_with_identity("x", 10)
    forms: list[Any] = [
        [np.array(row, np.int64) for row in rows],
        [torch.tensor(row, dtype=torch.int64) for row in rows],
        object_column([np.array(row, np.int32) for row in rows]),
        rd.RaggedTensorValue(flat, splits),
        rd.SparseTensorValue(np.array(places, np.int64).reshape(-1, 2), flat, np.array([len(rows), 4])),
    ]
    found = [one(column, {"x": form}) for form in forms]
    assert all(np.array_equal(each, found[0]) for each in found)
    assert [[id_ for id_ in row if id_ >= 0] for row in found[0].tolist()] == [
        [v for v in row if v >= 0] for row in rows
    ]


def test_features_without_values() -> None:
    columns = (
        fc.categorical_column_with_hash_bucket("x", 9),
        fc.categorical_column_with_vocabulary_list("x", ["a"], num_oov_buckets=1),
        fc.categorical_column_with_identity("x", 3),
        fc.crossed_column(["x", "x"], 9),
    )
    for column in columns:
        assert one(column, {"x": []}).shape == (0, 1)
        assert one(column, {"x": [[], []]}).tolist() == [[-1], [-1]]
        element = fc.FeatureSpace([column]).transform({"x": []}, batched=False)
        assert element[column.name].tolist() == [-1]


@given(st.lists(st.tuples(st.sampled_from("abc "), st.integers(-1, 3), NUMBERS), min_size=1))
def test_elements_give_the_rows_of_batches(rows: list[tuple[str, int, float]]) -> None:
    word = fc.categorical_column_with_hash_bucket("word", 7)
    space = fc.FeatureSpace(
        [
            *(word, fc.numeric_column("size"), fc.categorical_column_with_identity("code", 4)),
            *(fc.indicator_column(word), fc.crossed_column(["word", "code"], 50)),
            fc.weighted_categorical_column(word, "weight"),
        ]
    )
    words, codes, sizes = (list(column) for column in zip(*rows, strict=True))
    words = [each.strip() for each in words]
    batch = space.transform(
        {"word": words, "code": np.array(codes), "size": np.array(sizes), "weight": np.abs(np.array(sizes))}
    )
    for row, (text, code, size) in enumerate(zip(words, codes, sizes, strict=True)):
        element = space.transform({"word": text, "code": code, "size": np.float64(size), "weight": abs(size)})
        for name, value in element.items():
            pairs = (
                [(value, batch[name])]
                if not isinstance(value, dict)
                else list(zip(value.values(), batch[name].values(), strict=True))
            )
            assert all(np.array_equal(alone, whole[row]) for alone, whole in pairs), name


def test_frequent_terms_are_kept_in_bounded_memory() -> None:
    draw = np.random.default_rng(3)
    words = np.array([f"w{rank}" for rank in draw.zipf(1.3, 20_000) % 5000])
    column = fc.categorical_column_with_vocabulary_list("x", fc.AdaptedVocabulary())
    counts = TermCounts(column, most=200)
    for part in np.array_split(words, 300):
        counts.update(FeatureBatch({"x": part}))
        assert len(counts._counts) <= 200
    exact = Counter(words.tolist())
    for term, count in exact.items():
        kept = counts._counts.get(term.encode(), 0)
        assert count - 2 * len(words) / 200 <= kept <= count
    found: Any = fc.FeatureSpace([column]).adapt([{"x": words}]).columns[0]
    assert found.vocabulary_list[:5] == tuple(term for term, _ in exact.most_common(5))
    assert len(found.vocabulary_list) == len(exact)


def test_a_term_that_becomes_frequent_late_is_kept() -> None:
    counts = TermCounts(fc.categorical_column_with_vocabulary_list("x", fc.AdaptedVocabulary()), most=200)
    counts.update(FeatureBatch({"x": np.repeat(np.arange(150), 1000 + np.arange(150))}))
    for part in range(40):
        counts.update(FeatureBatch({"x": np.append(np.full(50, 777), 10_000 + 200 * part + np.arange(200))}))
    assert counts._counts[777] >= 40 * 50 - 2 * (161_175 + 40 * 250) / 200


def test_vocabulary_files(tmp_path: Path) -> None:
    file = tmp_path / "terms"
    file.write_bytes(b"b\xff\r\na\n7\n")
    column = fc.categorical_column_with_vocabulary_file("x", file)
    file.unlink()
    values = np.array([b"a", b"b\xff", b"c"], object)
    assert one(column, {"x": values}).tolist() == [[1], [0], [-1]]
    space = fc.FeatureSpace([column])
    space.save(tmp_path / "space.json")
    assert fc.FeatureSpace.load(tmp_path / "space.json") == space
    file.write_text("5\n6")
    integers = fc.categorical_column_with_vocabulary_file("x", str(file), dtype="int64", default_value=1)
    assert one(integers, {"x": np.array([6, 5, 0, -1])}).tolist() == [[1], [0], [1], [-1]]
    for arguments, message in (
        ({"vocabulary_size": 3}, "at most the 2 lines"),
        ({"vocabulary_size": 0}, "must be >= 1"),
    ):
        with pytest.raises(rd.InvalidArgumentError, match=message):
            fc.categorical_column_with_vocabulary_file("x", file, **arguments)
    file.write_text("5\nfive\n")
    with pytest.raises(rd.InvalidArgumentError, match="must be integers: .*five"):
        fc.categorical_column_with_vocabulary_file("x", file, dtype="int64")
    with pytest.raises(rd.NotFoundError):
        fc.categorical_column_with_vocabulary_file("x", tmp_path / "none")


def test_weights_belong_to_ids() -> None:
    column = fc.weighted_categorical_column(fc.categorical_column_with_identity("x", 9), "w", dtype="float64")
    dense = one(column, {"x": np.array([[1, -1], [2, 3]]), "w": np.array([[0.5, 7.0], [0.0, 2.0]])})
    assert dense["ids"].tolist() == [[1, -1], [2, 3]]
    assert dense["weights"].tolist() == [[0.5, 0.0], [0.0, 2.0]]
    assert dense["weights"].dtype == np.float64
    summed = one(fc.indicator_column(column), {"x": [[4, 4], [0]], "w": [[1.0, 2.0], [5.0]]})
    assert (summed[0, 4], summed[1, 0], summed.sum()) == (3, 5, 8)
    with pytest.raises(
        rd.InvalidArgumentError, match=r"'w' must have one value for each value of 'x'.*\[1, 1\].*\[2, 1\]"
    ):
        one(column, {"x": [[1, 2], [3]], "w": [[1.0], [2.0]]})


# --- data sets --------------------------------------------------------------------------------------------------------


def test_data_sets_are_adapted_to_and_mapped_by_batch_or_by_element() -> None:
    people = rd.Dataset.from_tensor_slices({"age": [20.0, 40.0, 60.0, 80.0], "job": ["cook", "b", "cook", "é"]})
    age = fc.numeric_column("age", normalizer_fn=fc.Normalization())
    job = fc.categorical_column_with_vocabulary_list("job", fc.AdaptedVocabulary(), num_oov_buckets=1)
    space = fc.FeatureSpace([age, fc.embedding_column(job, 2), fc.indicator_column(job)])
    adapted = space.adapt(people.batch(3))
    assert adapted == space.adapt(people) == space.adapt(list(people.as_numpy_iterator()))
    assert adapted.adapt([]) is not None, "what is known needs no data"
    whole = [batch["job_embedding"] for batch in people.batch(4).map(adapted.transform)]
    alone = [element["job_embedding"] for element in people.map(adapted.transform)]
    assert whole[0].tolist() == [each.tolist() for each in alone] == [[0], [1], [0], [2]]
    words = fc.FeatureSpace([fc.categorical_column_with_hash_bucket("job", 9)])
    ragged = people.map(lambda each: {"job": np.array([each["job"]] * int(each["age"] // 20))}).ragged_batch(4)
    (batch,) = ragged.map(words.transform).as_numpy_iterator()
    assert (batch["job"] >= 0).sum(1).tolist() == [1, 2, 3, 4]
    with pytest.raises(rd.InvalidArgumentError, match=r"must be finite, got an infinite dataset. .*take"):
        space.adapt(people.repeat())


def test_parsed_examples(tmp_path: Path) -> None:
    column = fc.categorical_column_with_vocabulary_list("words", ["a", "b"])
    space = fc.FeatureSpace([column, fc.numeric_column("size", default_value=5)])
    # tf.train.Example with a list of bytes, written by hand.
    record = b"\n\x14\n\x12\n\x05words\x12\t\n\x07\n\x01b\n\x02zz"
    spec = fc.make_parse_example_spec(space.columns)
    batch = space.transform(rd.parse_example(np.array([record, b""], object), spec))
    assert batch["words"].tolist() == [[1, -1], [-1, -1]]
    assert batch["size"].tolist() == [[5], [5]]
    single = space.transform(rd.parse_single_example(record, spec), batched=False)
    assert single["words"].tolist() == [1, -1]


def test_a_space_is_small_when_it_is_sent(tmp_path: Path) -> None:
    space = fc.FeatureSpace([fc.categorical_column_with_vocabulary_list("x", [f"term {i}" for i in range(1000)])])
    before = len(pickle.dumps(space))
    space.transform({"x": ["term 7"]})
    assert len(pickle.dumps(space)) == before, "without the table of terms"
    assert pickle.loads(pickle.dumps(space)).transform({"x": ["term 7"]})["x"].tolist() == [[7]]


def test_nothing_loads_torch_or_ray() -> None:
    code = (
        "import sys, raydist as rd; column = rd.feature.categorical_column_with_hash_bucket('x', 9); "
        "rd.feature.FeatureSpace([column]).transform({'x': ['a']}); print(*{m.split('.')[0] for m in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "ray"} & set(done.stdout.split())


# --- files ------------------------------------------------------------------------------------------------------------

KEYS = st.sampled_from(["a", "b.c", "é"])
NUMERIC = st.builds(
    fc.numeric_column,
    KEYS,
    default_value=st.none() | NUMBERS,
    dtype=st.sampled_from(["float32", "float64"]),
    normalizer_fn=st.none() | st.builds(fc.Normalization) | st.builds(fc.Normalization, NUMBERS, st.floats(0, 9)),
)
BOUNDARIES = st.lists(NUMBERS, min_size=1, unique=True).map(sorted) | st.builds(fc.AdaptedBoundaries, st.integers(2, 9))
TERMS = (
    st.lists(TEXT, min_size=1, unique=True)
    | st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, unique=True)
    | st.builds(fc.AdaptedVocabulary, st.none() | st.integers(1, 9), st.integers(1, 9))
)
CATEGORICAL: st.SearchStrategy[Any] = st.one_of(
    st.builds(fc.bucketized_column, NUMERIC, BOUNDARIES),
    st.builds(fc.categorical_column_with_hash_bucket, KEYS, st.integers(1, 99), st.sampled_from(["string", "int64"])),
    st.builds(fc.categorical_column_with_vocabulary_list, KEYS, TERMS, num_oov_buckets=st.integers(0, 3)),
    st.builds(fc.categorical_column_with_identity, KEYS, st.integers(5, 99), st.none() | st.integers(0, 4)),
)
UNHASHED = CATEGORICAL.filter(lambda column: not hasattr(column, "hash_bucket_size"))
CROSSED = st.recursive(
    UNHASHED | KEYS,
    lambda keys: st.builds(fc.crossed_column, st.lists(keys, min_size=2, max_size=3), st.integers(1, 99)),
    max_leaves=4,
).filter(lambda column: hasattr(column, "hash_bucket_size"))
WEIGHTED = st.builds(fc.weighted_categorical_column, CATEGORICAL, KEYS)
COLUMNS = st.one_of(
    *(NUMERIC, CATEGORICAL, CROSSED, WEIGHTED, st.builds(fc.indicator_column, CATEGORICAL | CROSSED | WEIGHTED)),
    st.builds(
        fc.embedding_column,
        CATEGORICAL | CROSSED | WEIGHTED,
        st.integers(1, 9),
        combiner=st.sampled_from(["mean", "sqrtn", "sum"]),
        max_norm=st.none() | st.floats(0.1, 9),
        trainable=st.booleans(),
        sharded=st.booleans(),
    ),
)


@given(st.lists(COLUMNS, min_size=1, max_size=4, unique_by=lambda column: column.name))
def test_files_hold_all_of_a_space(tmp_path_factory: pytest.TempPathFactory, columns: list[Any]) -> None:
    space, path = fc.FeatureSpace(columns), tmp_path_factory.mktemp("space") / "deeper" / "space.json"
    space.save(path)
    assert fc.FeatureSpace.load(path) == space
    space.save(path)
    assert [file.name for file in path.parent.iterdir()] == ["space.json"]


def test_functions_are_given_again_and_parts_stay_shared(tmp_path: Path) -> None:
    path = tmp_path / "space.json"
    age = fc.numeric_column("age", normalizer_fn=np.log1p)
    ages = fc.bucketized_column(age, [1, 2])
    table = fc.embedding_column(fc.crossed_column([ages, "x"], 9), 2, initializer=torch.nn.init.ones_)
    fc.FeatureSpace([age, ages, table]).save(path)
    functions = {"age": np.log1p, table.name: torch.nn.init.ones_}
    loaded: Any = fc.FeatureSpace.load(path, custom_objects=functions).columns
    assert loaded == (age, ages, table)
    assert loaded[1].source_column is loaded[0]
    assert loaded[2].categorical_column.keys[0] is loaded[1]
    with pytest.raises(rd.InvalidArgumentError, match=r"the column 'age', saved as 'log1p'. Give it"):
        fc.FeatureSpace.load(path)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "space.json"
    fc.FeatureSpace([fc.numeric_column("x")]).save(path)
    document = json.loads(path.read_text())
    others: list[tuple[Any, type[Exception], str]] = [
        ({**document, "version": 2}, rd.InvalidArgumentError, "format version 2, this raydist reads version 1"),
        ({**document, "format": "x"}, rd.DataLossError, "the format is 'x'"),
        ({**document, "sha256": "0"}, rd.DataLossError, "checksum"),
        ([], rd.DataLossError, "no whole file of a feature space"),
        ("", rd.DataLossError, "no whole file of a feature space"),
    ]
    for content, error, message in others:
        path.write_text(json.dumps(content))
        with pytest.raises(error, match=message):
            fc.FeatureSpace.load(path)
    with pytest.raises(rd.NotFoundError):
        fc.FeatureSpace.load(tmp_path / "none.json")


# --- errors -----------------------------------------------------------------------------------------------------------

X = fc.numeric_column("x")
WORD = fc.categorical_column_with_hash_bucket("word", 3)
MAKING: list[tuple[str, str]] = [
    ("fc.numeric_column('')", "a str that is not empty, got ''"),
    ("fc.numeric_column('x', shape=0)", "must hold integers >= 1, got 0"),
    ("fc.numeric_column('x', shape=())", "must hold integers >= 1, got \\(\\)"),
    ("fc.numeric_column('x', dtype='bool')", "integer or floating one, got 'bool'"),
    ("fc.numeric_column('x', default_value='a')", "default_value must be one float32 value"),
    ("fc.numeric_column('x', normalizer_fn=3)", "function or None, got 3"),
    ("fc.bucketized_column(WORD, [1])", "numeric_column of one dimension"),
    ("fc.bucketized_column(fc.numeric_column('x', (1, 2)), [1])", "numeric_column of one dimension"),
    ("fc.bucketized_column(X, [])", "list of rising numbers, got \\[\\]"),
    ("fc.bucketized_column(X, [1, 1])", "list of rising numbers"),
    ("fc.categorical_column_with_hash_bucket('x', 0)", "hash_bucket_size must be an int >= 1, got 0"),
    ("fc.categorical_column_with_hash_bucket('x', 3, 'float32')", "'string' or an integer one, got 'float32'"),
    ("fc.categorical_column_with_vocabulary_list('x', [])", "strings, or integers, got \\[\\]"),
    ("fc.categorical_column_with_vocabulary_list('x', ['a', 1])", "strings, or integers"),
    ("fc.categorical_column_with_vocabulary_list('x', 'ab')", "strings, or integers, got 'ab'"),
    ("fc.categorical_column_with_vocabulary_list('x', {'a', 'b'})", "strings, or integers"),
    ("fc.categorical_column_with_vocabulary_list('x', ['a', b'a'])", "must differ, got 1 of them again"),
    ("fc.categorical_column_with_vocabulary_list('x', ['a'], 'int64')", "that of its terms, string, got int64"),
    ("fc.categorical_column_with_vocabulary_list('x', ['a'], None, 0, 1)", "got 1 and 0. Leave one"),
    ("fc.categorical_column_with_identity('x', 3, 3)", "one of the 3 ids, got 3"),
    ("fc.crossed_column(['x'], 9)", "two keys or columns at least"),
    ("fc.crossed_column(['x', WORD], 9)", "neither hash nor weigh"),
    ("fc.crossed_column(['x', X], 9)", "neither hash nor weigh"),
    ("fc.indicator_column(X)", "categorical_column must be made by"),
    ("fc.weighted_categorical_column('x', 'y')", "categorical_column must be made by"),
    ("fc.embedding_column(WORD, 0)", "dimension must be an int >= 1, got 0"),
    ("fc.embedding_column(WORD, 1, 'max')", "one of mean, sqrtn, sum, got 'max'"),
    ("fc.embedding_column(WORD, 1, initializer=len, sharded=True)", "None with sharded=True"),
    ("fc.Normalization(1.0)", "given both, or none of them, got 1.0 and None"),
    ("fc.Normalization(1.0, -1.0)", "must be >= 0, got \\(-1.0,\\)"),
    ("fc.AdaptedBoundaries(1)", "int >= 2, got 1"),
    ("fc.AdaptedVocabulary(0)", "max_terms must be an int >= 1, got 0"),
    ("fc.FeatureSpace([])", "list of one column at least"),
    ("fc.FeatureSpace(['x'])", "made by functions of rd.feature, got \\['x'\\]"),
    ("fc.FeatureSpace([X, fc.categorical_column_with_identity('x', 3)])", "different names, got 'x' more than once"),
]


@pytest.mark.parametrize(("expression", "message"), MAKING)
def test_what_cannot_be_made(expression: str, message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        eval(expression)


USING: list[tuple[Any, dict[str, Any], str]] = [
    (X, {"y": np.zeros(2)}, "must have 'x', got 'y'. Add it"),
    (X, {"x": np.zeros((2, 3))}, r"must have the shape \('rows', 1\), got \(2, 3\)"),
    (X, {"x": np.array(["a"])}, "'x' must be an array of numbers"),
    (X, {"x": [[1.0], [1.0, 2.0]]}, "'x' must be an array of numbers"),
    (WORD, {"word": np.array([1.5])}, "must be integers or strings, got float64"),
    (WORD, {"word": np.array([1])}, "must have the dtype of its column, string, got integers"),
    (WORD, {"word": np.array(["a", 3], object)}, "valid str, got others"),
    (WORD, {"word": np.array(["a", None], object)}, "valid str, got None. Replace it in a map"),
    (WORD, {"word": [["a"], "b"]}, "Each row of 'word' must be a list or an array, .* got 'b'. Write"),
    (WORD, {"word": [["a"], None]}, "Each row of 'word' must be a list or an array, .* got None. Write"),
    (WORD, {"word": np.zeros((2, 2, 2), np.int64)}, r"\(rows,\) or \(rows, values\), 'word' has \(2, 2, 2\)"),
    (WORD, {"word": rd.RaggedTensorValue(rd.RaggedTensorValue(0, 0), 0)}, "must have one level of rows"),
    (WORD, {"word": rd.SparseTensorValue([[0, 0, 0]], ["a"], [1, 1, 1])}, "must have two dimensions"),
    (fc.categorical_column_with_identity("x", 3), {"x": np.array([3])}, "below num_buckets=3, got 3. Give"),
    (fc.crossed_column(["x", "y"], 9), {"x": ["a"], "y": ["a", "b"]}, "one number of rows, got 2 and 1"),
    (fc.bucketized_column(X, fc.AdaptedBoundaries(2)), {"x": np.zeros(2)}, "'x_bucketized' must be adapted"),
    (
        fc.numeric_column("x", normalizer_fn=fc.Normalization()),
        {"x": np.zeros(2)},
        "adapted to data. Call FeatureSpace",
    ),
    (fc.weighted_categorical_column(WORD, "w"), {"word": ["a"], "w": ["b"]}, "Values of 'w' must be numbers"),
]


@pytest.mark.parametrize(("column", "features", "message"), USING)
def test_what_cannot_be_transformed(column: Any, features: dict[str, Any], message: str) -> None:
    with pytest.raises((rd.InvalidArgumentError, rd.SpecError), match=message):
        one(column, features)


def test_what_cannot_be_adapted_to() -> None:
    ask = fc.FeatureSpace([fc.bucketized_column(X, fc.AdaptedBoundaries(2))])
    word = fc.FeatureSpace([fc.categorical_column_with_vocabulary_list("x", fc.AdaptedVocabulary(min_count=2))])
    cases: list[tuple[Any, Any, str]] = [
        (ask, [], "must have an element, got none"),
        (ask, [np.zeros(3)], "must be dicts of features, got ndarray. Drop the labels"),
        (ask, [{"x": np.array([np.inf])}], "with 1 infinite values"),
        (ask, [{"x": np.array([np.nan])}], "must have a value of 'x', got none, or NaN alone"),
        (word, [{"x": ["a", "b"]}], "must have a term of 'x', got none for AdaptedVocabulary"),
        (word, [{"x": ["a"]}, {"x": np.array([1])}], "must be all strings, or all integers, got both"),
        (word, [{"x": np.array([1.5])}], "must be integers or strings"),
    ]
    for space, data, message in cases:
        with pytest.raises((rd.InvalidArgumentError, rd.SpecError), match=message):
            space.adapt(data)
    different = fc.FeatureSpace([X, WORD])
    with pytest.raises(rd.InvalidArgumentError, match=r"one number of rows, got {'x': 2, 'word': 1}"):
        different.transform({"x": np.zeros(2), "word": ["a"]})
