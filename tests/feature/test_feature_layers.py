"""DenseFeatures and LinearModel in training: on one device, on replicas, with sharded tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd

fc = rd.feature
ROWS = 24


def people() -> dict[str, Any]:
    draw = np.random.default_rng(5)
    return {
        "age": draw.uniform(10, 90, ROWS),
        "pair": draw.normal(size=(ROWS, 2)),
        "job": draw.choice(["cook", "baker", "nurse", "pilot", ""], (ROWS, 3)).astype(object),
        "city": draw.integers(0, 9, ROWS),
        "income": draw.integers(0, 2, (ROWS, 1)).astype(np.float64),
    }


def spaces() -> tuple[Any, Any]:
    """Columns of the wide and of the deep part, with statistics of the data."""
    age = fc.numeric_column("age", dtype="float64", normalizer_fn=fc.Normalization())
    pair = fc.numeric_column("pair", 2, dtype="float64")
    ages = fc.bucketized_column(fc.numeric_column("age"), fc.AdaptedBoundaries(4))
    job = fc.categorical_column_with_vocabulary_list("job", fc.AdaptedVocabulary())
    city = fc.categorical_column_with_identity("city", 9)
    wide = fc.FeatureSpace([ages, job, pair, fc.crossed_column([ages, city], 40)]).adapt([people()])
    deep = fc.FeatureSpace([age, ages, fc.indicator_column(job), fc.embedding_column(city, 3)]).adapt([people()])
    return wide, deep


class WideAndDeep(nn.Module):
    def __init__(self, wide: Any, deep: Any) -> None:
        super().__init__()
        self.wide, self.inputs = rd.LinearModel(wide), rd.DenseFeatures(deep)
        self.deep = nn.Linear(self.inputs.out_features, 1)

    def forward(self, features: Any) -> torch.Tensor:
        result: torch.Tensor = self.wide(features) + self.deep(self.inputs(features))
        return result


def batches(*given: Any) -> rd.Dataset:
    every = fc.FeatureSpace([*{column.name: column for space in given for column in space.columns}.values()])
    rows = rd.Dataset.from_tensor_slices(people())
    return rows.batch(8).map(lambda batch: (every.transform(batch), batch["income"]))


def by_hand(wide: Any, deep: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same inputs as one matrix for each part."""
    raw, names = people(), {column.name: column for space in (wide, deep) for column in space.columns}
    ages = np.digitize(raw["age"].astype(np.float32), names["age_bucketized"].boundaries)
    buckets = np.eye(4)[ages]
    terms = list(names["job_indicator"].categorical_column.vocabulary_list)
    jobs = np.array([[(row == term).sum() for term in terms] for row in raw["job"]])
    crossed = wide.transform(raw)["age_bucketized_X_city"][:, 0]
    ages_normalized = ((raw["age"] - raw["age"].mean()) / raw["age"].std())[:, np.newaxis]
    parts = {
        "wide": np.concatenate([buckets, np.eye(40)[crossed], jobs, raw["pair"]], 1),
        "deep": np.concatenate([ages_normalized, buckets], 1),
        "jobs": jobs,
        "city": raw["city"],
    }
    return {name: torch.tensor(value) for name, value in parts.items()}, torch.tensor(raw["income"])


def test_wide_and_deep_is_the_model_by_hand() -> None:
    torch.manual_seed(0)
    wide, deep = spaces()
    model = WideAndDeep(wide, deep).double()
    table: Any = model.inputs.embeddings["city_embedding"]
    mine, targets = by_hand(wide, deep)
    weights = nn.ParameterDict(
        {
            "wide": torch.zeros(mine["wide"].shape[1], 1, dtype=torch.float64),
            "deep": model.deep.weight.detach().T.clone(),
            "table": table.weight.detach().clone(),
        }
    )
    biases = nn.ParameterList([torch.zeros(1, dtype=torch.float64), model.deep.bias.detach().clone()])
    ours = torch.optim.Adagrad(model.parameters(), lr=0.1)
    theirs = torch.optim.Adagrad([*weights.values(), *biases], lr=0.1)
    for _ in range(5):
        for number, (features, income) in enumerate(batches(wide, deep)):
            rows = slice(8 * number, 8 * number + 8)
            inputs = torch.cat([mine["deep"][rows], weights["table"][mine["city"][rows]], mine["jobs"][rows]], 1)
            expected = mine["wide"][rows] @ weights["wide"] + inputs @ weights["deep"] + biases[0] + biases[1]
            found = model(features)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
            for optimizer, result, wanted in ((ours, found, income), (theirs, expected, targets[rows])):
                optimizer.zero_grad()
                F.binary_cross_entropy_with_logits(result, wanted).backward()
                optimizer.step()
    torch.testing.assert_close(table.weight, weights["table"], rtol=1e-9, atol=1e-9)
    assert F.binary_cross_entropy_with_logits(found, income) < 0.6


def trained(strategy: rd.Strategy, wide: Any, deep: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with strategy.scope():
        model = WideAndDeep(wide, deep).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(batch: Any) -> None:
        features, income = batch
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(features), income).backward()
        optimizer.step()

    for _ in range(2):
        for batch in strategy.distribute_dataset(batches(wide, deep)):
            strategy.run(step, args=(batch,))
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.ray
def test_replicas_train_as_one_device_does(mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    wide, deep = spaces()
    expected, found = (trained(strategy, wide, deep) for strategy in (rd.OneDeviceStrategy("cpu"), mirrored(2)))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn", "sum"])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_sharded_table_is_like_another(combiner: str, max_norm: float | None) -> None:
    job = fc.categorical_column_with_hash_bucket("job", 20)
    settings: Any = {"combiner": combiner, "max_norm": max_norm}
    sharded, dense = (
        rd.DenseFeatures([fc.embedding_column(job, 4, sharded=each, **settings)]) for each in (True, False)
    )
    space = fc.FeatureSpace([fc.embedding_column(job, 4)])
    ids = torch.tensor(space.transform(people())["job_embedding"])
    tables: list[Any] = [module.embeddings["job_embedding"] for module in (sharded, dense)]
    with torch.no_grad():
        tables[1].weight.copy_(tables[0].rows(torch.arange(20)))
    assert 0.3 < tables[1].weight.std() < 0.7, "1 / sqrt(4)"
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (sharded, dense)]
    for _ in range(3):
        results = [module({"job_embedding": ids}) for module in (sharded, dense)]
        torch.testing.assert_close(*results)
        for optimizer, result in zip(optimizers, results, strict=True):
            optimizer.zero_grad()
            result.square().sum().backward()
            optimizer.step()
    touched = set(ids[ids >= 0].tolist())
    assert set(tables[0].rows.export_rows()[0]["rows"].tolist()) <= {*range(20)}
    torch.testing.assert_close(tables[0].rows(torch.tensor([*touched])), tables[1].weight[[*touched]])


def test_tables_as_their_columns_ask() -> None:
    job = fc.categorical_column_with_hash_bucket("a.b", 1000)
    still: Any = rd.DenseFeatures([fc.embedding_column(job, 2, trainable=False, sharded=True)])
    assert not any(parameter.requires_grad for parameter in still.parameters())
    fixed = fc.embedding_column(job, 16, trainable=False)
    table: Any = rd.DenseFeatures([fixed]).embeddings["a_b_embedding"]
    assert not table.weight.requires_grad
    assert table.weight.std() == pytest.approx(0.88 / 4, rel=0.05)  # of a normal one, cut at two deviations
    assert table.weight.abs().max() <= 2 / 4
    ones = fc.embedding_column(job, 2, "sum", torch.nn.init.ones_)
    assert rd.DenseFeatures([ones])({"a.b_embedding": torch.tensor([[3, -1], [-1, -1]])}).tolist() == [[1, 1], [0, 0]]


def test_columns_that_do_not_fit() -> None:
    job = fc.categorical_column_with_hash_bucket("job", 5)
    other = fc.embedding_column(fc.categorical_column_with_hash_bucket("a_b", 5), 2)
    twin = fc.embedding_column(fc.categorical_column_with_hash_bucket("a.b", 5), 2)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: rd.DenseFeatures([job]), "must give numbers, 'job' gives ids. Put it into"),
        (lambda: rd.LinearModel([fc.embedding_column(job, 2)]), "must have no table, got 'job_embedding'"),
        (lambda: rd.DenseFeatures([other, twin]), "'_' for '.', got 'a_b_embedding' again"),
        (lambda: rd.LinearModel([job], sparse_combiner="max"), "one of mean, sqrtn, sum, got 'max'"),
        (lambda: rd.LinearModel([job])({"jobs": torch.zeros(1, 1)}), "have 'job', got 'jobs'"),
        (
            lambda: rd.LinearModel([fc.categorical_column_with_vocabulary_list("x", fc.AdaptedVocabulary())]),
            "'x' must be adapted to data. Call FeatureSpace.adapt first",
        ),
    ]
    for make, message in cases:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            make()
