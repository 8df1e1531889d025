"""Callbacks, hooks, their logs, functions as hooks; loggers with fakes of their packages (real: tests/trackers)."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.training.callbacks.callback import BatchLogs
from tests.refused import check_refused
from tests.training.toys import Recorder, compiled, history_of, regression, small_net


def test_batch_logs_are_read_once_and_only_in_their_hook() -> None:
    reads: list[int] = []

    def read() -> dict[str, float]:
        reads.append(1)
        return {"loss": 0.5}

    logs = BatchLogs(read)
    assert logs or {}
    assert not reads
    assert (logs["loss"], dict(logs), len(logs), logs.get("accuracy")) == (0.5, {"loss": 0.5}, 1, None)
    assert len(reads) == 1
    logs.seal()
    assert logs["loss"] == 0.5
    logs = BatchLogs(read)
    logs.seal()
    with pytest.raises(rd.FailedPreconditionError, match=r"must be read in its hook.*dict\(logs\)"):
        logs["loss"]


def test_functions_are_called_as_hooks() -> None:
    calls: list[Any] = []
    names = ["on_epoch_begin", "on_epoch_end", "on_train_begin", "on_train_end", "on_test_begin", "on_batch_end"]
    hooks: dict[str, Any] = {name: lambda *args, name=name: calls.append((name, len(args))) for name in names}
    data = regression(4, 4)
    compiled(small_net()).fit(data, validation_data=data, callbacks=[rd.LambdaCallback(**hooks)], verbose=False)
    assert calls == [
        ("on_train_begin", 1),
        ("on_epoch_begin", 2),
        ("on_batch_end", 2),
        ("on_test_begin", 1),
        ("on_epoch_end", 2),
        ("on_train_end", 1),
    ]


def test_bad_callbacks_and_hooks() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"on_epoch": print}, "no hook 'on_epoch'. Use one of on_batch_begin"),
        ({"on_epoch_end": 1}, "be a function"),
    ]
    check_refused(lambda hooks: rd.LambdaCallback(**hooks), cases)
    check_refused(
        lambda given: compiled(small_net()).fit(regression(4, 4), callbacks=[given], verbose=False),
        [(Recorder, "instances of raydist.Callback.*Was a class passed")],
    )
    with pytest.raises(rd.InvalidArgumentError, match="separator must be one character, got ', '"):
        rd.CSVLogger("log.csv", separator=", ")


def test_a_file_has_a_line_for_every_epoch_and_is_replaced_or_added_to(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.csv"
    first, second = history_of([1.0, 2.0], rd.CSVLogger(path))["loss"]
    assert path.read_text() == f"epoch,loss,score,val_loss,val_score\n0,{first},1.0,NA,NA\n1,{second},2.0,NA,NA\n"
    for append, expected in [(False, 2), (True, 3), (False, 2)]:
        history_of([1.0], rd.CSVLogger(path, append=append))
        assert len(path.read_text().splitlines()) == expected


def test_lines_after_a_checkpoint_are_cut_off(tmp_path: Path) -> None:
    logger, again = rd.CSVLogger(tmp_path / "log.csv"), rd.CSVLogger(tmp_path / "log.csv")
    logger.on_train_begin({})
    logger.on_epoch_end(0, {"loss": 0.5, "values": torch.tensor([1, 2])})
    state = logger.state_dict()
    logger.on_epoch_end(1, {"loss": 0.25, "values": torch.tensor([3, 4])})
    again.on_train_begin({})
    again.load_state_dict(state)
    again.on_epoch_end(1, {"loss": 0.125, "values": torch.tensor([5, 6])})
    assert (tmp_path / "log.csv").read_text().splitlines() == [
        "epoch,loss,values,val_loss,val_values",
        '0,0.5,"[1, 2]",NA,NA',
        '1,0.125,"[5, 6]",NA,NA',
    ]


def test_progress_is_shown_once_where_the_bar_says(capsys: pytest.CaptureFixture[str]) -> None:
    for verbose in (False, True):
        out = io.StringIO()
        compiled(small_net()).fit(regression(4, 4), epochs=2, callbacks=[rd.ProgressBar(out)], verbose=verbose)
        assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == ["Epoch 1/2", "Epoch 2/2"]
        assert capsys.readouterr().out == ""


def test_callbacks_know_model_and_params() -> None:
    begun: list[Any] = []

    class Look(rd.Callback):
        def on_batch_begin(self, batch: int, logs: Mapping[str, Any]) -> None:
            begun.append((batch, self.model, self.params))

    model = compiled(small_net())
    model.fit(regression(10, 4), epochs=2, callbacks=[Look()], verbose=False)
    assert begun == [(batch, model, {"epochs": 2, "steps": 3}) for batch in [0, 1, 2] * 2]


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
    with pytest.raises(rd.FailedPreconditionError, match=rf"pip install 'raydist\[{package}\]'"):
        compiled(small_net()).fit(regression(4, 4), callbacks=[LOGGERS[package]()], verbose=False)
    with pytest.raises(rd.InvalidArgumentError, match="update_freq must be"):
        LOGGERS[package](update_freq="batch")
