"""Hooks that count global steps: they stop, log, save and write curves, in `fit` and in estimators."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from tests.summary.reading import curves
from tests.training.toys import At, compiled, interrupt, line, regression, small_net


def fitted(*callbacks: rd.Callback, epochs: int = 2, **settings: Any) -> rd.Model:
    """A model after epochs of 5 batches."""
    with rd.OneDeviceStrategy("cpu").scope():
        model = compiled(small_net(), **settings)
    model.fit(regression(20, 4), epochs=epochs, callbacks=callbacks, verbose=False)
    return model


def steps_of(model: rd.Model) -> int:
    return int(model.strategy._make_counter().value)


@pytest.mark.parametrize(("size", "expected"), [(1, 7), (2, 7), (4, 9)])
def test_training_stops_at_a_step(size: int, expected: int) -> None:
    """A call of the replicas is not cut short."""
    stop = rd.StopAtStepHook(num_steps=7)
    assert steps_of(fitted(stop, steps_per_execution=size)) == stop.global_step == expected
    model = fitted(rd.StopAtStepHook(last_step=3))
    model.fit(regression(20, 4), callbacks=[rd.StopAtStepHook(last_step=6)], verbose=False)
    assert steps_of(model) == 6


def test_values_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "raydist")
    fitted(rd.LoggingTensorHook({"mse": "loss"}, every_n_iter=4, at_end=True, formatter=lambda found: f"{[*found]}"))
    fitted(rd.LoggingTensorHook(["loss"], every_n_iter=5), epochs=1)
    *before, last = [record.getMessage() for record in caplog.records]
    assert before == ["['mse']"] * 3
    assert last.startswith("loss = 2.")
    assert last.endswith(", step = 5")
    with pytest.raises(rd.InvalidArgumentError, match=r"must be names of logs, \['loss'\], got 'mse'"):
        fitted(rd.LoggingTensorHook(["mse"], every_n_secs=1e-9))


def test_nan_ends_training() -> None:
    rows = rd.Dataset.from_tensor_slices((torch.ones(4, 1), torch.full((4, 1), float("nan")))).batch(1)

    def fit(hook: rd.Callback) -> int:
        with rd.OneDeviceStrategy("cpu").scope():
            model = compiled(line())
        model.fit(rows.map(lambda x, y: (x.astype("float64"), y)), callbacks=[hook], verbose=False)
        return steps_of(model)

    with pytest.raises(rd.FailedPreconditionError, match="must be a number, got NaN in batch 0"):
        fit(rd.NanTensorHook())
    assert fit(rd.NanTensorHook(fail_on_nan_loss=False)) == 1


def test_curves_are_written(tmp_path: Path) -> None:
    hooks = rd.SummarySaverHook(save_steps=3, output_dir=tmp_path), rd.StepCounterHook(5, output_dir=tmp_path / "rate")
    model = fitted(*hooks)
    assert [step for step, _ in curves(tmp_path).scalars("loss")] == [3, 6, 9]
    rates = dict(curves(tmp_path / "rate").scalars("global_step/sec"))
    assert sorted(rates) == [5, 10]
    assert min(rates.values()) > 0
    model.fit(regression(20, 4), callbacks=[hooks[0]], verbose=False)
    assert sorted(step for step, _ in curves(tmp_path).scalars("loss")) == [3, 6, 9, 12, 15]


def test_a_saver_resumes_within_an_epoch_and_tells_its_listeners(tmp_path: Path) -> None:
    told: list[str] = []

    def saver(folder: str) -> rd.Callback:
        listener = [lambda handle: told.append(Path(handle.path).name)]
        return rd.CheckpointSaverHook(tmp_path / folder, save_steps=2, max_to_keep=2, listeners=listener)

    whole = fitted(saver("whole"))
    assert told == ["ckpt-2", "ckpt-4", "ckpt-5", "ckpt-7", "ckpt-9", "ckpt-10"]
    assert sorted(path.name for path in (tmp_path / "whole").glob("ckpt*")) == ["ckpt-10", "ckpt-9"]
    told.clear()
    with pytest.raises(KeyboardInterrupt):
        fitted(saver("broken"), At("on_train_batch_end", 9, interrupt))
    resumed = fitted(saver("broken"))
    assert told == ["ckpt-2", "ckpt-4", "ckpt-5", "ckpt-7", "ckpt-9", "ckpt-10"]
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: rd.StopAtStepHook(),
        lambda: rd.StopAtStepHook(1, 2),
        lambda: rd.LoggingTensorHook(["loss"]),
        lambda: rd.SummarySaverHook(1, 1.0, "logs"),
        lambda: rd.StepCounterHook(0, output_dir="logs"),
        lambda: rd.CheckpointSaverHook("run"),
    ],
)
def test_one_interval_is_given(make: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"Give \w+ or \w+ as a number > 0, got"):
        make()
    with pytest.raises(rd.InvalidArgumentError, match="output_dir must be the directory of the summaries, got None"):
        rd.StepCounterHook()
