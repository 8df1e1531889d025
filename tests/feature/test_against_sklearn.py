"""Columns on real data give the ids and statistics of scikit-learn, of numpy, and of hashing by hand."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raydist as rd
from tests.feature.farmhash import cross, fingerprint64
from tests.real_data import real_file

preprocessing = pytest.importorskip("sklearn.preprocessing")
fc = rd.feature

NUMBERS = {"age": 1, "wage": 6, "gains": 17, "losses": 18, "dividends": 19, "weight": 25, "persons": 31, "weeks": 40}
CODES = {"industry": 3, "occupation": 4}
WORDS = {"class": 2, "education": 5, "marital": 8, "sex": 13, "state": 22, "household": 23, "birth": 35}


def census_rows(lines: Any) -> dict[str, Any]:
    rows = list(csv.reader((line.decode() for line in lines), skipinitialspace=True))
    return {
        **{name: np.array([float(row[place]) for row in rows]) for name, place in NUMBERS.items()},
        **{name: np.array([int(row[place]) for row in rows]) for name, place in CODES.items()},
        **{name: np.array([row[place] for row in rows], object) for name, place in WORDS.items()},
        **{f"{name}_too": np.array([row[place] for row in rows], object) for name, place in WORDS.items()},
    }


def census_columns() -> list[Any]:
    numeric = {name: fc.numeric_column(name, dtype="float64", normalizer_fn=fc.Normalization()) for name in NUMBERS}
    plain = {name: fc.numeric_column(name) for name in NUMBERS}
    buckets = {name: fc.bucketized_column(each, fc.AdaptedBoundaries(10)) for name, each in plain.items()}
    words = {name: fc.categorical_column_with_vocabulary_list(name, fc.AdaptedVocabulary()) for name in WORDS}
    return [
        *(*numeric.values(), *buckets.values(), *words.values()),
        *map(fc.indicator_column, words.values()),
        fc.indicator_column(fc.categorical_column_with_identity("industry", 52)),
        fc.categorical_column_with_identity("occupation", 47),
        fc.categorical_column_with_hash_bucket("industry", 1000, dtype="int64"),
        fc.crossed_column(["education", "household"], 10_000),
        fc.crossed_column([words["sex"], "education", buckets["age"]], 100_000),
        fc.indicator_column(fc.weighted_categorical_column(words["education"], "weeks")),
        fc.embedding_column(words["birth"], 3),
    ]


def hashed_columns() -> list[Any]:
    few = fc.AdaptedVocabulary(max_terms=2)
    return [
        *(fc.categorical_column_with_hash_bucket(f"{name}_too", 50) for name in ("class", "state", "birth")),
        *(
            fc.indicator_column(fc.categorical_column_with_hash_bucket(f"{name}_too", 500))
            for name in ("education", "sex")
        ),
        fc.categorical_column_with_vocabulary_list("marital_too", few, num_oov_buckets=3),
        fc.categorical_column_with_vocabulary_list("household_too", few, default_value=1),
    ]


def criteo_columns() -> list[Any]:
    return [
        *(fc.numeric_column(f"I{i}", dtype="float64", normalizer_fn=fc.Normalization()) for i in range(1, 14)),
        *(fc.bucketized_column(fc.numeric_column(f"I{i}"), fc.AdaptedBoundaries(7)) for i in range(1, 14)),
        *(
            fc.categorical_column_with_vocabulary_list(f"C{i}", fc.AdaptedVocabulary(40, min_count=2), "int64", -1, 5)
            for i in range(1, 14)
        ),
        *(fc.indicator_column(fc.categorical_column_with_identity(f"C{i}", 200)) for i in range(14, 20)),
        *(fc.categorical_column_with_hash_bucket(f"C{i}", 1000, dtype="int64") for i in range(20, 27)),
        fc.crossed_column(["C1", "C9", "C20"], 12_345),
    ]


def criteo_rows(records: Any) -> dict[str, Any]:
    features = {
        **{f"I{i}": rd.FixedLenFeature((1,), "float32") for i in range(1, 14)},
        **{f"C{i}": rd.FixedLenFeature((), "int64") for i in range(1, 27)},
    }
    found: dict[str, Any] = rd.parse_example(records, features)
    return found


class Results:
    """A space that was adapted on some workers, and what it made of all rows."""

    def __init__(self, columns: list[Any], rows: rd.Dataset, workers: int, folder: Path) -> None:
        dataset = rows.with_options(rd.Options(num_input_workers=workers))
        self.space = fc.FeatureSpace(tuple(columns)).adapt(dataset)
        self.space.save(folder / f"{workers}.json")
        self.file = (folder / f"{workers}.json").read_bytes()
        batches = list(dataset.map(self.space.transform).as_numpy_iterator())
        self.of = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        self.columns: dict[str, Any] = {column.name: column for column in self.space.columns}

    def check_numbers(self, names: list[str], raw: dict[str, Any]) -> None:
        for name in names:
            scaler = preprocessing.StandardScaler().fit(raw[name].reshape(-1, 1).astype(np.float64))
            fitted = self.columns[name].normalizer_fn
            np.testing.assert_allclose([fitted.mean, fitted.variance], [scaler.mean_, scaler.var_], rtol=1e-12)
            expected = scaler.transform(raw[name].reshape(-1, 1).astype(np.float64))
            np.testing.assert_allclose(self.of[name], expected, rtol=1e-12, atol=1e-12)

    def check_buckets(self, names: list[str], count: int, raw: dict[str, Any]) -> None:
        for name in names:
            values = raw[name].reshape(-1, 1).astype(np.float64)
            quantiles = np.unique(np.quantile(values, np.arange(1, count) / count))
            boundaries = self.columns[f"{name}_bucketized"].boundaries
            above = quantiles[quantiles > values.min()]
            assert boundaries == (tuple(above) or (np.unique(values)[1],)), name
            found = self.of[f"{name}_bucketized"]
            if len(above) and above[-1] < values.max():  # scikit-learn has no bucket for the largest value alone
                settings = {"encode": "ordinal", "strategy": "quantile", "quantile_method": "linear"}
                bins = preprocessing.KBinsDiscretizer(count, subsample=None, **settings).fit(values)
                assert (found == bins.transform(values)).all(), name
            else:
                assert (found == np.digitize(values, boundaries)).all(), name


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Bins whose width are too small")
def test_census(tmp_path: Path, ray_cluster: None) -> None:
    lines = rd.TextLineDataset(real_file("census-income.sample")).batch(32)
    raw = census_rows(lines.unbatch().as_numpy_iterator())
    results = on_workers([*census_columns(), *hashed_columns()], lines.map(census_rows), tmp_path)
    check_census(results, raw)
    check_hashed(results, raw)


def on_workers(columns: list[Any], rows: rd.Dataset, folder: Path) -> Results:
    """The results, which are the same on 0, 1 and 3 input workers."""
    results = [Results(columns, rows, workers, folder) for workers in (0, 1, 3)]
    for each in results[1:]:
        assert each.file == results[0].file
        assert all((each.of[name] == results[0].of[name]).all() for name in results[0].of)
    return results[0]


def check_census(results: Results, raw: dict[str, Any]) -> None:
    results.check_numbers(list(NUMBERS), raw)
    results.check_buckets(list(NUMBERS), 10, raw)
    for name in WORDS:
        values, terms = raw[name].reshape(-1, 1), results.columns[name].vocabulary_list
        counts = Counter(raw[name])
        assert terms == tuple(sorted(counts, key=lambda term: (-counts[term], term)))
        ordinal = preprocessing.OrdinalEncoder(categories=[list(terms)]).fit(values)
        assert (results.of[name] == ordinal.transform(values)).all()
        one_hot = preprocessing.OneHotEncoder(categories=[list(terms)], sparse_output=False).fit(values)
        assert (results.of[f"{name}_indicator"] == one_hot.transform(values)).all()
    industries = preprocessing.OneHotEncoder(categories=[range(52)], sparse_output=False)
    assert (results.of["industry_indicator"] == industries.fit_transform(raw["industry"].reshape(-1, 1))).all()
    assert (results.of["occupation"][:, 0] == raw["occupation"]).all()
    check_crosses(results, raw)
    weeks = results.of["education_indicator"] * raw["weeks"][:, np.newaxis]
    assert (results.of["education_weighted_by_weeks_indicator"] == weeks.astype(np.float32)).all()
    features = rd.DenseFeatures([results.columns["birth_embedding"]])
    table: Any = features.embeddings["birth_embedding"]
    found = features({"birth_embedding": torch.from_numpy(results.of["birth_embedding"])})
    assert torch.equal(found, table.weight[torch.from_numpy(results.of["birth"][:, 0])])


def text_hashes(values: Any) -> list[int]:
    return [fingerprint64(str(value).encode()) for value in values.ravel()]


def check_crosses(results: Results, raw: dict[str, Any]) -> None:
    assert results.of["industry"][:, 0].tolist() == [hash_ % 1000 for hash_ in text_hashes(raw["industry"])]
    educations, households = text_hashes(raw["education"]), text_hashes(raw["household"])
    pairs = [cross(first, second) % 10_000 for first, second in zip(educations, households, strict=True)]
    assert results.of["education_X_household"][:, 0].tolist() == pairs
    # The feature in a dense array comes last.
    sexes, ages = results.of["sex"][:, 0].tolist(), results.of["age_bucketized"][:, 0].tolist()
    triples = [cross(*values) % 100_000 for values in zip(sexes, ages, educations, strict=True)]
    assert results.of["age_bucketized_X_education_X_sex"][:, 0].tolist() == triples


def check_hashed(results: Results, raw: dict[str, Any]) -> None:
    for name in ("class", "state", "birth"):
        assert results.of[f"{name}_too"][:, 0].tolist() == [hash_ % 50 for hash_ in text_hashes(raw[name])]
    for name in ("education", "sex"):
        buckets = np.array([hash_ % 500 for hash_ in text_hashes(raw[name])]).reshape(-1, 1)
        one_hot = preprocessing.OneHotEncoder(categories=[range(500)], sparse_output=False)
        assert (results.of[f"{name}_too_indicator"] == one_hot.fit_transform(buckets)).all()
    known = [Counter(raw[name]).most_common(2) for name in ("marital", "household")]
    places = [{term: place for place, (term, _) in enumerate(each)} for each in known]
    hashed = [2 + hash_ % 3 for hash_ in text_hashes(raw["marital"])]
    expected = [places[0].get(term, other) for term, other in zip(raw["marital"], hashed, strict=True)]
    assert results.of["marital_too"][:, 0].tolist() == expected
    assert results.of["household_too"][:, 0].tolist() == [places[1].get(term, 1) for term in raw["household"]]


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Bins whose width are too small")
def test_criteo(tmp_path: Path, ray_cluster: None) -> None:
    rows = rd.TFRecordDataset(real_file("criteo_sample.tr.tfrecords")).batch(25).map(criteo_rows)
    raw = {name: np.concatenate([batch[name] for batch in rows.as_numpy_iterator()]) for name in rows.element_spec}
    results = on_workers(criteo_columns(), rows, tmp_path)
    results.check_numbers([f"I{i}" for i in range(1, 14)], raw)
    results.check_buckets([f"I{i}" for i in range(1, 14)], 7, raw)
    for name in (f"C{i}" for i in range(1, 14)):
        counts = Counter(raw[name].tolist())
        terms = sorted((term for term in counts if counts[term] >= 2), key=lambda term: (-counts[term], term))[:40]
        assert results.columns[name].vocabulary_list == tuple(terms)
        hashed = [len(terms) + hash_ % 5 for hash_ in text_hashes(raw[name])]
        expected = [terms.index(v) if v in terms else h for v, h in zip(raw[name].tolist(), hashed, strict=True)]
        assert results.of[name][:, 0].tolist() == expected
    for name in (f"C{i}" for i in range(14, 20)):
        one_hot = preprocessing.OneHotEncoder(categories=[range(200)], sparse_output=False)
        assert (results.of[f"{name}_indicator"] == one_hot.fit_transform(raw[name].reshape(-1, 1))).all()
    for name in (f"C{i}" for i in range(20, 27)):
        assert results.of[name][:, 0].tolist() == [hash_ % 1000 for hash_ in text_hashes(raw[name])]
    crosses = zip(*(raw[name].tolist() for name in ("C1", "C9", "C20")), strict=True)
    assert results.of["C1_X_C20_X_C9"][:, 0].tolist() == [cross(*values) % 12_345 for values in crosses]
