"""`fit` calls the hooks that Keras calls, with the same logs, and ends with the same weights.

`beside_keras/record.py` has written down what Keras does in the programs of `beside_keras/programs.json`; here raydist
runs the same programs. What differs stands in `DIFFERENCES`, with its reason in the documentation of `rd.Callback`.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanAbsoluteError

import raydist as rd
from tests.training.beside_keras.record import arrays, run

HERE = Path(__file__).parent / "beside_keras"
PROGRAMS = {each["name"]: each for each in json.loads((HERE / "programs.json").read_text())}
RECORDED = {each["name"]: each for each in json.loads((HERE / "recorded.json").read_text())}


def model_of(program: dict[str, Any]) -> rd.Model:
    classes = program.get("classes")
    net = nn.Linear(1, 2 if classes else 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.5], [-0.5]] if classes else [[0.5]]))
    model = rd.Model(net)
    model.compile(
        torch.optim.SGD(net.parameters(), lr=program.get("rate", 0.1)),
        "cross_entropy" if classes else "mse",
        metrics={"mae": MeanAbsoluteError()} if program.get("metrics") else (),
        steps_per_execution=program.get("steps_per_execution", 1),
    )
    return model


def run_here(program: dict[str, Any], folder: Path) -> dict[str, Any]:
    def weights_of(model: rd.Model) -> list[float]:
        return [float(value) for value in next(model.parameters()).detach().reshape(-1)]

    return run(program, str(folder), model_of(program), rd, rd.Dataset.from_tensor_slices, weights_of)


def close(found: Any, expected: Any) -> bool:
    """Equal, numbers to 1e-6."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    if isinstance(expected, float):
        return isinstance(found, float) and math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9)
    return bool(found == expected)


def stops_when_data_runs_out(recorded: dict[str, Any]) -> None:
    """Keras begins the data anew."""
    end = next(place for place, call in enumerate(recorded["calls"]) if call[:2] == ["on_epoch_begin", 2])
    recorded["calls"] = [*recorded["calls"][:end], ["on_train_end", None, recorded["calls"][end - 1][2]]]
    recorded["epochs"], recorded["history"] = [0, 1], {"loss": recorded["history"]["loss"][:2]}
    x, y = arrays(10, {})
    weight = 0.5
    for start in (0, 4, 8):
        rows = slice(start, start + 4)
        weight -= 0.1 * float(np.mean(2 * (weight * x[rows] - y[rows]) * x[rows]))
    recorded["weights"] = [weight]


def divides_by_the_sum_of_weights(recorded: dict[str, Any]) -> None:
    """Keras divides by the number of rows, whatever they weigh: only hooks and names are the same."""
    for call in recorded["calls"]:
        call[2] = dict.fromkeys(call[2], 0.0)
    recorded["history"] = {name: [0.0] * len(values) for name, values in recorded["history"].items()}
    recorded["weights"] = []


def counts_batches_that_there_are(recorded: dict[str, Any]) -> None:
    """Keras counts an execution that comes short as a whole one."""
    ends = ("on_train_batch_end", "on_test_batch_end")
    for call in recorded["calls"]:
        if call[0] in ends:
            call[1] = min(call[1], 3 if call[0] == ends[0] else 1)


DIFFERENCES: dict[str, Callable[[dict[str, Any]], None]] = {
    "too few batches for steps_per_epoch": stops_when_data_runs_out,
    "weights of classes": divides_by_the_sum_of_weights,
    "weights of rows": divides_by_the_sum_of_weights,
    "an execution that comes short": counts_batches_that_there_are,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_fit_does_what_keras_does(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The dataset ran out of batches")
        found = run_here(PROGRAMS[name], tmp_path)
    expected = copy.deepcopy(RECORDED[name])
    if change := DIFFERENCES.get(name):
        change(expected)
        assert expected != RECORDED[name]
        if change is divides_by_the_sum_of_weights:
            change(found)
    for place, (call, other) in enumerate(zip(found["calls"], expected["calls"], strict=False)):
        assert close(call, other), f"call {place}: {call} here, {other} in Keras"
    for part in ("calls", "epochs", "history", "weights", "csv"):
        assert close(found[part], expected[part]), f"{part}: {found[part]} here, {expected[part]} in Keras"
