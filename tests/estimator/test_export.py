"""Exported estimators predict what the estimators predict, without their code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import raydist as rd
from tests.estimator.test_model_fns import PARAMS, data, model_fn


def test_a_model_fn_is_exported(tmp_path: Path) -> None:
    estimator = rd.Estimator(model_fn, tmp_path / "run", params=PARAMS).train(data)
    x = torch.stack([element[0] for element in data().unbatch()])
    path = estimator.export_saved_model(tmp_path / "export", x[:3])
    assert path == str(tmp_path / "export" / "1")
    expected = torch.stack([row["y"] for row in estimator.predict(data)])
    found = rd.load_exported(path)(x)
    torch.testing.assert_close(found["y"], expected)
    torch.testing.assert_close(found["twice"], 2 * expected)


def test_a_canned_estimator_is_exported_with_its_columns(tmp_path: Path) -> None:
    job = rd.feature.categorical_column_with_vocabulary_list("job", ["cook", "pilot"])
    columns = [job, rd.feature.numeric_column("age")]
    features = {"job": np.array(["cook", "pilot", "nurse"], object), "age": np.array([1.0, -1.0, 0.5])}
    people = rd.Dataset.from_tensor_slices((features, [0, 1, 1])).batch(2)
    classifier = rd.LinearClassifier(columns, tmp_path / "run").train(lambda: people.repeat(5))
    exported = rd.load_exported(classifier.export_saved_model(tmp_path / "export", features))
    expected = [row["probabilities"] for row in classifier.predict(lambda: people)]
    torch.testing.assert_close(exported(features)["probabilities"], torch.stack(expected))
