"""Writes down what Keras does in the programs of `programs.json`: hooks, logs, history, weights.

    KERAS_BACKEND=tensorflow python tests/training/beside_keras/record.py

needs an environment with Keras (the table was made by Keras 3.15.1 with TensorFlow 2.21) and nothing of raydist.
`tests/training/test_beside_keras.py` has raydist do the same and compares.
"""

from __future__ import annotations

import importlib
import json
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent


def arrays(rows: int, program: dict[str, Any]) -> tuple[Any, Any]:
    x = np.linspace(-1.0, 1.0, rows)[:, None]
    if "nan_row" in program:
        x[program["nan_row"]] = np.inf
    return x, (x > 0).astype(np.int64)[:, 0] if program.get("classes") else 2 * x


def plain(logs: Any) -> dict[str, Any]:
    values = {name: float(value) for name, value in dict(logs or {}).items()}
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}


def recorder(seen: Any, stop_at: Any) -> Any:
    seen.calls = []

    def note(hook: str, index: int | None, logs: Any) -> None:
        seen.calls.append([hook, index, {} if hook.startswith("on_predict") else plain(logs)])
        if stop_at == [hook.split("_")[-2], index] and hook in ("on_train_batch_end", "on_epoch_end"):
            seen.model.stop_training = True

    for hook in [f"on_{part}_{when}" for part in ("train", "test", "predict") for when in ("begin", "end")]:
        setattr(seen, hook, lambda logs=None, hook=hook: note(hook, None, logs))
    parts = ("epoch", "train_batch", "test_batch", "predict_batch")
    for hook in [f"on_{part}_{when}" for part in parts for when in ("begin", "end")]:
        setattr(seen, hook, lambda index, logs=None, hook=hook: note(hook, index, logs))
    return seen


def keras_model(program: dict[str, Any]) -> Any:
    keras = importlib.import_module("keras")
    classes = program.get("classes")
    layer = keras.layers.Dense(2 if classes else 1, use_bias=False)
    model = keras.Sequential([keras.Input((1,)), layer])
    layer.set_weights([np.array([[0.5, -0.5]]) if classes else np.array([[0.5]])])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if classes else "mse"
    metrics = [keras.metrics.MeanAbsoluteError(name="mae")] if program.get("metrics") else []
    optimizer = keras.optimizers.SGD(program.get("rate", 0.1))
    model.compile(optimizer, loss, metrics=metrics, steps_per_execution=program.get("steps_per_execution", 1))
    return model


def data_of(slices: Callable[[Any], Any], program: dict[str, Any], rows: int, *, weighted: bool = False) -> Any:
    weights = (np.linspace(0.5, 2.0, rows),) if weighted else ()
    return slices((*arrays(rows, program), *weights)).batch(program.get("batch_size", 32))


def callbacks_of(callbacks: Any, program: dict[str, Any], folder: str) -> list[Any]:
    given = [getattr(callbacks, name)(**settings) for name, settings in program.get("callbacks", [])]
    if rates := program.get("schedule"):
        given.append(callbacks.LearningRateScheduler(lambda epoch, _: rates[epoch]))
    if program.get("csv"):
        given.append(callbacks.CSVLogger(f"{folder}/log.csv"))
    return given


def settings_of(program: dict[str, Any]) -> dict[str, Any]:
    names = ("epochs", "initial_epoch", "steps_per_epoch", "validation_freq", "validation_steps")
    settings: dict[str, Any] = {name: program[name] for name in names if name in program}
    if "class_weight" in program:
        settings["class_weight"] = {int(name): value for name, value in program["class_weight"].items()}
    return settings


def run(
    program: dict[str, Any],
    folder: str,
    model: Any,
    callbacks: Any,
    slices: Callable[[Any], Any],
    weights_of: Callable[[Any], list[float]],
) -> dict[str, Any]:
    """Run one program with a model; return its hooks, logs and weights.

    `callbacks` has the classes of callbacks, and `slices` makes a dataset of arrays.
    """
    seen = recorder(callbacks.Callback(), program.get("stop_at"))
    data = data_of(slices, program, program["rows"], weighted="sample_weight" in program)
    held_out = data_of(slices, program, program["held_out"]) if "held_out" in program else None
    given = [*callbacks_of(callbacks, program, folder), seen]
    history = model.fit(data, validation_data=held_out, callbacks=given, verbose=False, **settings_of(program))
    if "evaluate" in program.get("then", ()):
        model.evaluate(data, callbacks=[seen], verbose=False)
    if "predict" in program.get("then", ()):
        model.predict(data.map(lambda x, _: x), callbacks=[seen], verbose=False)
    return {
        "name": program["name"],
        "calls": seen.calls,
        "history": {name: [plain({"": one})[""] for one in values] for name, values in history.history.items()},
        "epochs": history.epoch,
        "weights": [value if math.isfinite(value) else str(value) for value in weights_of(model)],
        "csv": Path(folder, "log.csv").read_text() if program.get("csv") else None,
    }


def keras_weights(model: Any) -> list[float]:
    weights: list[float] = model.get_weights()[0][0].tolist()
    return weights


def main() -> None:
    keras = importlib.import_module("keras")
    keras.backend.set_floatx("float64")
    slices = importlib.import_module("tensorflow").data.Dataset.from_tensor_slices
    recorded = []
    for program in json.loads((HERE / "programs.json").read_text()):
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = keras_model(program)
            recorded.append(run(program, folder, model, keras.callbacks, slices, keras_weights))
    lines = ",\n".join(json.dumps(one) for one in recorded)
    (HERE / "recorded.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
