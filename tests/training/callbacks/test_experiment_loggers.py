"""Logs of `fit` in Weights & Biases and MLflow, which are fakes here; tests/hub has the real packages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import raydist as rd
from tests.training.toys import compiled, regression, small_net

LOGGERS = {"wandb": rd.WandbLogger, "mlflow": rd.MLflowLogger}


class Tracker:
    """The parts of both packages that the loggers use; `runs` has each run's values by step."""

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.finished: list[str] = []
        self.tags: dict[str, str] = {}

    def init(self, *, resume: str, **arguments: Any) -> SimpleNamespace:
        run = arguments["id"]
        values = self.runs.setdefault(run, [])

        def log(row: Mapping[str, float]) -> None:
            rest = dict(row)
            values.append((int(rest.pop("global_step")), rest))

        return SimpleNamespace(define_metric=lambda *_, **__: None, log=log, finish=lambda: self.finished.append(run))

    def MlflowClient(self, tracking_uri: str | None) -> Tracker:
        return self

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> list[SimpleNamespace]:
        key = filter_string.split("'")[1]
        return [SimpleNamespace(info=SimpleNamespace(run_id=run)) for run, held in self.tags.items() if held == key]

    def create_run(self, experiment: str, run_name: str | None, tags: dict[str, str]) -> SimpleNamespace:
        run = f"run-{len(self.runs)}"
        self.runs[run] = []
        (self.tags[run],) = tags.values()
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def update_run(self, run: str, status: str) -> None:
        assert run in self.runs

    def log_metric(self, run: str, name: str, value: float, step: int) -> None:
        rows = self.runs[run]
        if not rows or rows[-1][0] != step or name in rows[-1][1]:
            rows.append((step, {}))
        rows[-1][1][name] = value

    def set_terminated(self, run: str) -> None:
        self.finished.append(run)


@pytest.fixture(params=LOGGERS)
def package(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def tracker(package: str, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    fake = Tracker()
    monkeypatch.setitem(sys.modules, package, fake)
    return fake


def test_epochs_and_steps_are_logged_at_the_global_step(package: str, tracker: Tracker) -> None:
    with rd.OneDeviceStrategy("cpu").scope():
        model = compiled(small_net())
    data = regression(12, 4)  # 3 batches an epoch
    logger = LOGGERS[package](update_freq=2)
    history = model.fit(data, epochs=2, validation_data=data, callbacks=[logger], verbose=False).history
    ((run, rows),) = tracker.runs.items()
    assert tracker.finished == [run]
    epochs = [(step, row) for step, row in rows if "epoch" in row]
    assert [step for step, _ in epochs] == [3, 6]
    assert [row["val_loss"] for _, row in epochs] == history["val_loss"]
    assert all(row["learning_rate"] > 0 for _, row in epochs)
    assert [step for step, row in rows if "batch/loss" in row] == [2, 4, 6]


def test_a_training_that_resumes_continues_its_run(package: str, tracker: Tracker, tmp_path: Path) -> None:
    for epochs in (1, 2):
        with rd.OneDeviceStrategy("cpu").scope():
            model = compiled(small_net())
        logger = LOGGERS[package]()
        model.fit(regression(8, 4), epochs=epochs, callbacks=[logger], checkpoint=tmp_path, verbose=False)
    ((_, rows),) = tracker.runs.items()
    assert [(step, row["epoch"]) for step, row in rows] == [(2, 0.0), (4, 1.0)]


def test_a_missing_package_is_an_error_that_says_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with rd.OneDeviceStrategy("cpu").scope():
        model = compiled(small_net())
    with pytest.raises(rd.FailedPreconditionError, match=rf"pip install 'raydist\[{package}\]'"):
        model.fit(regression(4, 4), callbacks=[LOGGERS[package]()], verbose=False)


def test_update_freq_is_checked(package: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="update_freq must be"):
        LOGGERS[package](update_freq="batch")
