"""Canned estimators train the parameters of bare loops on the census, and learn digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch.nn import functional as F

import raydist as rd
from tests.estimator.test_model_fns import variables
from tests.real_data import real_file

fc = rd.feature
BATCH_SIZE = 33  # of 200 rows: the last batch has 2, so that one of three replicas has none
EPOCHS = 2
RELATION = "detailed_household_summary_in_household"
Values = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Census:
    """The rows, the columns, and the inputs of both parts as matrices by hand."""

    def __init__(self, folder: Path) -> None:
        files = {"train": real_file("census-income.sample")}
        self.rows: rd.Dataset = rd.load("census_income_kdd", "train", data_dir=folder, files=files)
        (raw,) = self.rows.batch(1000).as_numpy_iterator()
        number = partial(fc.numeric_column, dtype="float64")
        word = partial(fc.categorical_column_with_vocabulary_list, vocabulary_list=fc.AdaptedVocabulary())
        buckets = fc.bucketized_column(number("age"), fc.AdaptedBoundaries(5))
        age = number("age", normalizer_fn=fc.Normalization())
        deep = [age, fc.indicator_column(word("marital_stat")), fc.embedding_column(word("education"), 3)]
        space = fc.FeatureSpace([buckets, word("education"), *deep]).adapt(self.rows.batch(50))
        columns: Any = space.columns
        self.wide, self.deep = columns[:2], columns[2:]
        education = list(columns[1].vocabulary_list)
        marital = list(columns[3].categorical_column.vocabulary_list)
        ids = [education.index(each) for each in raw["education"]]
        years = raw["age"].astype(np.float64)
        ages = np.digitize(years, np.asarray(columns[0].boundaries))
        self.inputs: Values = {
            "age_bucketized": torch.tensor(np.eye(5)[ages]),
            "education": torch.tensor(np.eye(len(education))[ids]),
            "age": torch.tensor((years - years.mean()) / years.std())[:, None],
            "marital_stat_indicator": torch.tensor(np.eye(len(marital))[[*map(marital.index, raw["marital_stat"])]]),
        }
        self.weights = torch.tensor(raw["instance_weight"].astype(np.float64))
        self.sexes = ["Female", "Male"]
        self.relations = sorted(set(raw[RELATION]))
        self.labels = {
            "income": torch.tensor(raw["label"]),
            "sex": torch.tensor([self.sexes.index(each) for each in raw["sex"]]),
            "relation": torch.tensor([self.relations.index(each) for each in raw[RELATION]]),
            "weeks": torch.tensor(raw["weeks_worked_in_year"].astype(np.float64))[:, None],
        }

    def data(self, label: str, epochs: int = 1) -> rd.Dataset:
        key = {"income": "label", "relation": RELATION, "weeks": "weeks_worked_in_year", "sex": "sex"}[label]
        return self.rows.batch(BATCH_SIZE).map(lambda row: (row, row[key])).repeat(epochs)

    def logits(self, values: Values, rows: slice) -> torch.Tensor:
        """What the model with these values gives."""
        inputs = {name: each[rows] for name, each in self.inputs.items()}
        total = torch.zeros(())
        if "linear.bias" in values:
            table, buckets = (
                values[f"linear.weights.{name}_weights.weight"] for name in ("education", "age_bucketized")
            )
            total = inputs["education"] @ table + inputs["age_bucketized"] @ buckets + values["linear.bias"]
        if "dnn.layers.0.weight" in values:
            words = inputs["education"] @ values["dnn.inputs.embeddings.education_embedding.weight"]
            hidden = torch.cat([inputs["age"], words, inputs["marital_stat_indicator"]], 1)
            hidden = torch.tanh(hidden @ values["dnn.layers.0.weight"].T + values["dnn.layers.0.bias"])
            total = total + hidden @ values["dnn.layers.1.weight"].T + values["dnn.layers.1.bias"]
        return total


def losses_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if labels.dim() == 2:
        return (logits - labels).square().mean(1)
    if logits.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(logits[:, 0], labels.double(), reduction="none")
    return F.cross_entropy(logits, labels, reduction="none")


class HandFtrl:
    """McMahan's update, one number after the other, as the paper writes it."""

    def __init__(self, values: Values, rate: float, l1: float = 0.0, l2: float = 0.0, beta: float = 0.0) -> None:
        self.values, self.settings = values, (rate, l1, l2, beta)
        self.n = {name: np.full(value.numel(), 0.1) for name, value in values.items()}
        self.z = {name: np.zeros(value.numel()) for name, value in values.items()}

    def step(self) -> None:
        rate, l1, l2, beta = self.settings
        for name, value in self.values.items():
            assert value.grad is not None
            flat = value.detach().view(-1)
            n, z = self.n[name], self.z[name]
            for at, gradient in enumerate(value.grad.view(-1).tolist()):
                sigma = (np.sqrt(n[at] + gradient**2) - np.sqrt(n[at])) / rate
                z[at] += gradient - sigma * float(flat[at])
                n[at] += gradient**2
                weight = -(z[at] - np.sign(z[at]) * l1) / ((beta + np.sqrt(n[at])) / rate + 2 * l2)
                flat[at] = 0.0 if abs(z[at]) <= l1 else weight


class First(rd.Callback):
    """Keeps the first values."""

    values: Values

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        state = self.model.module.state_dict()
        self.values = {name: torch.tensor(value.tolist()).requires_grad_() for name, value in state.items()}


def bare_loop(
    census: Census, values: Values, label: str, rates: tuple[Any, float], *, weighted: bool, total: bool
) -> None:
    """Train the values in place."""
    linear = {name: value for name, value in values.items() if name.startswith("linear")}
    dnn = [value for name, value in values.items() if name.startswith("dnn")]
    optimizers: list[Any] = [HandFtrl(linear, **rates[0])] if linear else []
    optimizers += [torch.optim.Adagrad(dnn, lr=rates[1], initial_accumulator_value=0.1)] if dnn else []
    for _ in range(EPOCHS):
        for at in range(0, 200, BATCH_SIZE):
            rows = slice(at, at + BATCH_SIZE)
            for value in values.values():
                value.grad = None
            losses = losses_of(census.logits(values, rows), census.labels[label][rows])
            if weighted:
                losses = losses * census.weights[rows]
            (losses.sum() if total else losses.mean()).backward()
            for optimizer in optimizers:
                optimizer.step()


WIDE = "linear_feature_columns"
DEEP: Any = {"dnn_hidden_units": [4], "dnn_activation_fn": torch.tanh}
# The estimator with its data, and what the bare loop does: label, settings of Ftrl, rate of Adagrad, weights, sums.
CASES: Mapping[str, tuple[Callable[[Census], Any], str, tuple[Any, float], bool, bool]] = {
    "linear classifier": (
        lambda c: partial(rd.LinearClassifier, c.wide, weight_column="instance_weight"),
        *("income", ({"rate": 0.2}, 0), True, False),
    ),
    "linear regressor": (
        lambda c: partial(
            rd.LinearRegressor,
            c.wide,
            optimizer=lambda p: rd.Ftrl(
                p, 0.5, l1_regularization_strength=0.3, l2_regularization_strength=0.1, beta=0.2
            ),
        ),
        *("weeks", ({"rate": 0.5, "l1": 0.3, "l2": 0.1, "beta": 0.2}, 0), False, False),
    ),
    "dense classifier": (
        lambda c: partial(
            rd.DNNClassifier,
            [4],
            c.deep,
            activation_fn=torch.tanh,
            n_classes=len(c.relations),
            label_vocabulary=c.relations,
        ),
        *("relation", ({}, 0.05), False, False),
    ),
    "dense regressor": (
        lambda c: partial(rd.DNNRegressor, [4], c.deep, activation_fn=torch.tanh, loss_reduction="sum"),
        *("weeks", ({}, 0.05), False, True),
    ),
    "wide and deep classifier": (
        lambda c: partial(
            rd.DNNLinearCombinedClassifier,
            linear_feature_columns=c.wide,
            dnn_feature_columns=c.deep,
            label_vocabulary=c.sexes,
            **DEEP,
        ),
        *("sex", ({"rate": 0.005}, 0.001), False, False),
    ),
    "wide and deep regressor": (
        lambda c: partial(
            rd.DNNLinearCombinedRegressor,
            linear_feature_columns=c.wide,
            dnn_feature_columns=c.deep,
            weight_column=fc.numeric_column("instance_weight", dtype="float64"),
            **DEEP,
        ),
        *("weeks", ({"rate": 0.005}, 0.001), True, False),
    ),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_a_bare_loop(strategy: rd.Strategy, tmp_path: Path, case: str) -> None:
    make, label, rates, weighted, total = CASES[case]
    census, first = Census(tmp_path / "data"), First()
    config = rd.RunConfig(tmp_path / "run", tf_random_seed=2, train_distribute=strategy)
    estimator = make(census)(config=config).train(lambda: census.data(label, EPOCHS), [first])
    values, before = first.values, {name: value.tolist() for name, value in first.values.items()}
    bare_loop(census, values, label, rates, weighted=weighted, total=total)
    trained = variables(estimator, "")
    assert set(trained) == set(values)
    for name, value in values.items():
        assert value.tolist() != before[name]
        torch.testing.assert_close(trained[name], value.detach(), rtol=1e-9, atol=1e-12)
    check_results(census, estimator, values, label, weighted=weighted, total=total)


def check_results(census: Census, estimator: Any, values: Values, label: str, *, weighted: bool, total: bool) -> None:
    """Compare an evaluation and predictions with sums by hand."""
    labels, weights = census.labels[label], census.weights if weighted else torch.ones(200)
    logits = census.logits(values, slice(None)).detach()
    losses = losses_of(logits, labels)
    found = estimator.evaluate(lambda: census.data(label))

    def mean(values: torch.Tensor) -> float:
        return float((values * weights).sum() / weights.sum())

    assert found["average_loss"] == pytest.approx(mean(losses), rel=1e-9)
    loss = float((losses * weights).sum())
    assert found["loss"] == pytest.approx(loss if total else loss / 200, rel=1e-9)
    rows = list(estimator.predict(lambda: census.data(label)))
    if labels.dim() == 2:
        torch.testing.assert_close(torch.stack([row["predictions"] for row in rows]), logits, rtol=1e-9, atol=1e-9)
        assert found["prediction/mean"] == pytest.approx(mean(logits[:, 0]), rel=1e-9)
        return
    chances = torch.stack([row["probabilities"] for row in rows])
    classes = (logits[:, 0] > 0).long() if len(chances[0]) == 2 else logits.argmax(1)
    assert [row["class_ids"].item() for row in rows] == chances.argmax(1).tolist() == classes.tolist()
    assert found["accuracy"] == pytest.approx(mean(classes == labels), rel=1e-9)
    names = {"relation": census.relations, "sex": census.sexes, "income": ["0", "1"]}[label]
    assert [row["classes"].tolist() for row in rows] == [[names[each]] for each in classes]
    if len(chances[0]) == 2:
        assert found["label/mean"] == pytest.approx(mean(labels), rel=1e-9)
        positive = mean(classes * labels)
        assert found["precision"] == pytest.approx(positive / mean(classes) if mean(classes) else 0.0, rel=1e-9)
        assert found["recall"] == pytest.approx(positive / mean(labels), rel=1e-9)
        assert ("auc" in found) != weighted
        if not weighted:
            assert found["auc"] == pytest.approx(roc_auc_score(labels, chances[:, 1]), abs=0.02)


def test_arguments_are_checked() -> None:
    x = fc.numeric_column("x")
    data = rd.Dataset.from_tensor_slices(({"x": [1.0, 2.0]}, [0, 2])).batch(2)
    with pytest.raises(rd.InvalidArgumentError, match=r"Labels must be among \[0, 1\], got 2"):
        rd.LinearClassifier([x]).train(lambda: data)
    with pytest.raises(rd.InvalidArgumentError, match="n_classes must be >= 2, got 1"):
        rd.LinearClassifier([x], n_classes=1)
    with pytest.raises(rd.InvalidArgumentError, match="label_vocabulary must have 2 labels, got 1"):
        rd.LinearClassifier([x], label_vocabulary=["a"])
    with pytest.raises(rd.InvalidArgumentError, match=r"Labels must be \(rows, 2\), got shape \(2,\)"):
        rd.LinearRegressor([x], label_dimension=2).train(lambda: data)
    with pytest.raises(rd.InvalidArgumentError, match="must be one of Adagrad, Adam, .*, got 'Adem'"):
        rd.LinearRegressor([x], optimizer="Adem").train(lambda: data)
    with pytest.raises(rd.InvalidArgumentError, match="loss_reduction must be sum_over_batch_size or sum, got 'none'"):
        rd.LinearRegressor([x], loss_reduction="none")  # type: ignore[arg-type]
    with pytest.raises(rd.InvalidArgumentError, match="hidden_units must be sizes of layers"):
        rd.DNNRegressor([], [x])
    with pytest.raises(rd.InvalidArgumentError, match="Give linear_feature_columns, dnn_feature_columns or both"):
        rd.DNNLinearCombinedRegressor()
    with pytest.raises(rd.InvalidArgumentError, match="Ftrl needs lr > 0"):
        rd.Ftrl([torch.nn.Parameter(torch.ones(1))], lr=0.0)


@pytest.mark.parametrize(
    ("make", "least"),
    [
        (partial(rd.LinearClassifier, n_classes=10), 0.88),
        (partial(rd.DNNClassifier, [128], n_classes=10, dropout=0.1), 0.93),
    ],
    ids=["linear", "dense"],
)
@pytest.mark.timeout(300)
@pytest.mark.long
def test_digits_are_learned(tmp_path: Path, make: Any, least: float) -> None:
    with np.load(real_file("mnist10k.npz")) as file:
        images, labels = (file[name] for name in sorted(file.files))
    torch.set_default_dtype(torch.float32)
    known, held_out = (
        rd.Dataset.from_tensor_slices(({"pixels": images[part].reshape(-1, 784)}, labels[part]))
        for part in (slice(8000), slice(8000, None))
    )
    pixels = fc.numeric_column("pixels", 784, normalizer_fn=lambda pixels: pixels / 255)
    config = rd.RunConfig(tmp_path, tf_random_seed=0)
    estimator = make(feature_columns=[pixels], config=config)
    estimator.train(lambda: known.shuffle(8000, seed=0).batch(50).repeat(10))
    accuracy = estimator.evaluate(lambda: held_out.batch(500))["accuracy"]
    print(f"accuracy {accuracy:.4f}")
    assert accuracy >= least
