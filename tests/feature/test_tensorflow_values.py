"""Columns give what TensorFlow gave for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import raydist as rd
from raydist.feature.fingerprint import fingerprint64
from raydist.pipelines.elements.columns import object_column
from tests.feature.tensorflow_cases import CATEGORICAL, DENSE, FEATURES, LENGTHS, LINEAR, hashed_bytes, table_values

VALUES: dict[str, Any] = json.loads(Path(__file__).with_name("tensorflow_values.json").read_text())


def features() -> dict[str, Any]:
    """Dense ones as arrays, the others as object arrays of rows."""
    found: dict[str, Any] = {}
    for name, rows in FEATURES.items():
        is_ragged = isinstance(rows[0], list) and len({len(row) for row in rows}) > 1
        found[name] = object_column([object_rows(row) for row in rows]) if is_ragged else np.array(rows)
    return found


def object_rows(row: list[Any]) -> np.ndarray:
    return np.array(row, object) if row and isinstance(row[0], str) else np.array(row)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("vocabulary") / "terms.txt"
    file.write_text("human\nmodel\nvery\n")

    def table(weight: torch.Tensor) -> None:
        weight.copy_(torch.from_numpy(table_values(*weight.shape)))

    return {"fc": rd.feature, "table": table, "int64": "int64", "file": file}


def transformed(columns: list[Any]) -> Any:
    return as_tensors(rd.feature.FeatureSpace(tuple(columns)).transform(features()))


def as_tensors(value: Any) -> Any:
    return {key: as_tensors(each) for key, each in value.items()} if isinstance(value, dict) else torch.tensor(value)


def test_hashes() -> None:
    hashes = fingerprint64(pa.array(list(map(hashed_bytes, LENGTHS)), pa.large_binary()))
    assert [hash_ % (2**63 - 1) for hash_ in hashes.tolist()] == VALUES["hashes"]
    # Of the tests of Google's FarmHash, of its ports and of TensorFlow.
    known = {b"": 11160318154034397263, b"a": 12917804110809363939, b"hello": 13009744463427800296}
    known |= {
        b"1234567890123456": 17239105360639788068,
        b"b" * 128: 17638211491968783095,
        b"a" * 64: 5893282057753879417,
    }
    assert fingerprint64(pa.array(list(known), pa.large_binary())).tolist() == list(known.values())


@pytest.mark.parametrize("expression", CATEGORICAL)
def test_ids(expression: str, names: dict[str, Any]) -> None:
    column = eval(expression, names)
    (found,) = transformed([column]).values()
    if isinstance(column, type(eval("fc.bucketized_column(fc.numeric_column('x'), [0])", names))):
        found = found + torch.arange(found.shape[1]) * (len(column.boundaries) + 1)
    ids = found["ids"] if isinstance(found, dict) else found
    expected = VALUES["ids"][expression]
    assert [[id_ for id_ in row if id_ >= 0] for row in ids.tolist()] == [
        [id_ for id_ in row if id_ >= 0] for row in expected
    ]


@pytest.mark.parametrize("expression", DENSE)
def test_dense_features(expression: str, names: dict[str, Any]) -> None:
    column = eval(expression, names)
    result = rd.DenseFeatures([column])(transformed([column]))
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.detach().numpy(), np.array(VALUES["dense"][expression]), rtol=2e-6)


@pytest.mark.parametrize("expression", LINEAR)
def test_linear_models(expression: str, names: dict[str, Any]) -> None:
    columns = eval(expression, names)
    model = rd.LinearModel(columns, units=2)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.5, -0.5]))
        weights: Any
        for weights in model.weights.values():
            weight = weights.weight.T if isinstance(weights, torch.nn.Linear) else weights.weight
            weight.copy_(torch.from_numpy(table_values(*weight.shape)))
    np.testing.assert_allclose(model(transformed(columns)).detach().numpy(), VALUES["linear"][expression], rtol=1e-6)
