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
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent


def arrays(rows: int, program: dict[str, Any]) -> tuple[Any, Any]:
    """Rows of y = 2 x, or of two classes."""
    x = np.linspace(-1.0, 1.0, rows)[:, None]
    if "nan_row" in program:
        x[program["nan_row"]] = np.inf
    return x, (x > 0).astype(np.int64)[:, 0] if program.get("classes") else 2 * x


def plain(logs: Any) -> dict[str, Any]:
    """Logs as JSON values."""
    values = {name: float(value) for name, value in dict(logs or {}).items()}
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}


def recorder(keras: Any, stop_at: Any) -> Any:
    """A callback that writes down hooks, indices and logs, and stops where it is told to."""
    seen = keras.callbacks.Callback()
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


def model_of(keras: Any, program: dict[str, Any]) -> Any:
    """y = w x, or two classes by it."""
    classes = program.get("classes")
    layer = keras.layers.Dense(2 if classes else 1, use_bias=False)
    model = keras.Sequential([keras.Input((1,)), layer])
    layer.set_weights([np.array([[0.5, -0.5]]) if classes else np.array([[0.5]])])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if classes else "mse"
    metrics = [keras.metrics.MeanAbsoluteError(name="mae")] if program.get("metrics") else []
    optimizer = keras.optimizers.SGD(program.get("rate", 0.1))
    model.compile(optimizer, loss, metrics=metrics, steps_per_execution=program.get("steps_per_execution", 1))
    return model


def data_of(program: dict[str, Any], rows: int, *, weighted: bool = False) -> Any:
    """Batches."""
    tf: Any = importlib.import_module("tensorflow")
    weights = (np.linspace(0.5, 2.0, rows),) if weighted else ()
    parts = (*arrays(rows, program), *weights)
    return tf.data.Dataset.from_tensor_slices(parts).batch(program.get("batch_size", 32))


def callbacks_of(keras: Any, program: dict[str, Any], folder: str) -> list[Any]:
    """Those of the program, but for the one that writes down."""
    given = [getattr(keras.callbacks, name)(**settings) for name, settings in program.get("callbacks", [])]
    if rates := program.get("schedule"):
        given.append(keras.callbacks.LearningRateScheduler(lambda epoch, _: rates[epoch]))
    if program.get("csv"):
        given.append(keras.callbacks.CSVLogger(f"{folder}/log.csv"))
    return given


def settings_of(program: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `fit`."""
    names = ("epochs", "initial_epoch", "steps_per_epoch", "validation_freq", "validation_steps")
    settings: dict[str, Any] = {name: program[name] for name in names if name in program}
    if "class_weight" in program:
        settings["class_weight"] = {int(name): value for name, value in program["class_weight"].items()}
    return settings


def run(keras: Any, program: dict[str, Any], folder: str) -> dict[str, Any]:
    """Run one program; return its hooks, logs and weights."""
    model, seen = model_of(keras, program), recorder(keras, program.get("stop_at"))
    data = data_of(program, program["rows"], weighted="sample_weight" in program)
    held_out = data_of(program, program["held_out"]) if "held_out" in program else None
    given = [*callbacks_of(keras, program, folder), seen]
    history = model.fit(data, validation_data=held_out, callbacks=given, verbose=0, **settings_of(program))
    if "evaluate" in program.get("then", ()):
        model.evaluate(data, callbacks=[seen], verbose=0)
    if "predict" in program.get("then", ()):
        model.predict(data.map(lambda x, _: x), callbacks=[seen], verbose=0)
    return {
        "name": program["name"],
        "calls": seen.calls,
        "history": {name: [plain({"": one})[""] for one in values] for name, values in history.history.items()},
        "epochs": history.epoch,
        "weights": [value if math.isfinite(value) else str(value) for value in model.get_weights()[0][0].tolist()],
        "csv": Path(folder, "log.csv").read_text() if program.get("csv") else None,
    }


def main() -> None:
    """Record all."""
    keras = importlib.import_module("keras")
    keras.backend.set_floatx("float64")
    recorded = []
    for program in json.loads((HERE / "programs.json").read_text()):
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recorded.append(run(keras, program, folder))
    lines = ",\n".join(json.dumps(one) for one in recorded)
    (HERE / "recorded.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
