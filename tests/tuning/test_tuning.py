"""Trials of Ray Tune on strategies: what they use is in their placement group, and gone when they end."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray import tune
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from ray.util.placement_group import placement_group_table
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import raydist as rd
from tests.conftest import live_actors
from tests.shared_files import shared_files
from tests.waiting import wait_until

SMALL = {"CPU": 0.01}
PLACES: dict[str, Any] = {"num_replicas": 2, "resources_per_replica": SMALL, "driver_resources": SMALL}

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
    pytest.mark.filterwarnings("ignore:Consider boosting PBT"),  # by reuse_actors
]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")


def results_of(trainable: Any, folder: Path, space: dict[str, Any], config: tune.TuneConfig, **run: Any) -> Any:
    """The results of a Tuner, whose trials leave nothing behind."""
    groups, actors, files = living_groups(), live_actors(), files_of_raydist()
    loggers: list[tune.Callback] = [
        JsonLoggerCallback(),
        CSVLoggerCallback(),
    ]  # without TensorBoard's, which leaves threads
    run_config = tune.RunConfig(storage_path=str(folder), verbose=0, callbacks=loggers, **run)
    results = tune.Tuner(trainable, param_space=space, tune_config=config, run_config=run_config).fit()
    wait_until(lambda: living_groups() <= groups and live_actors() <= actors, 20)
    left = files_of_raydist() - files
    wait_until(lambda: not left & files_of_raydist(), 20)  # others than this test have some for a moment
    return results


def living_groups() -> set[str]:
    return {key for key, group in placement_group_table().items() if group["state"] != "REMOVED"}


def files_of_raydist() -> set[str]:
    return shared_files() | {path.name for path in Path(tempfile.gettempdir()).glob("raydist-tune-*")}


def group_of(_: Any = 0) -> str:
    """The placement group of this process."""
    return str(ray.get_runtime_context().get_placement_group_id())


def compiled(strategy: rd.Strategy, lr: float) -> rd.Model:
    torch.manual_seed(0)
    with strategy.scope():
        module = nn.Linear(1, 1)
        model = rd.Model(module)
        model.compile(torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9), nn.MSELoss())
    return model


def line() -> rd.Dataset:
    x = torch.arange(16.0)[:, None].numpy() / 16
    return rd.Dataset.from_tensor_slices((x, 2 * x)).shuffle(16, seed=1).batch(4)


class FailsOnce(rd.Callback):
    """Writes each epoch that begins into a file, and raises at the first third one."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(str(epoch))
        if self._file.read_text() == "012":
            raise ValueError("as planned")


class Marked:
    """A strategy that leaves a file once it is closed. Tune itself does not wait for that."""

    def __init__(self, folder: Path, num_replicas: int, **options: Any) -> None:
        os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = "0"
        self._mark = folder / f"closed-{tune.get_context().get_trial_id()}"
        self._strategy = rd.MirroredStrategy(num_replicas, **options)

    def __enter__(self) -> rd.Strategy:
        return self._strategy.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._strategy.close()
        self._mark.touch()


def train_line(config: dict[str, Any], strategy: rd.Strategy) -> None:
    """Three epochs; or as many as Tune allows."""
    folder = Path(config["folder"])
    callbacks: list[rd.Callback] = [rd.TuneReportCallback({"loss": "loss"})]
    if config["kind"] == "fails":
        callbacks.append(FailsOnce(folder / "epochs"))
        options = rd.InputOptions(num_input_workers=1, resources_per_input_worker=SMALL)
        batches = strategy.distribute_dataset(rd.Dataset.range(2).map(group_of).batch(2), options)
        on_workers = {str(name) for batch in batches for part in strategy.local_results(batch) for name in part}
        on_replicas = {str(value) for value in strategy.local_results(strategy.run(group_of))}
        (folder / "groups").write_text(json.dumps([[group_of()], sorted(on_replicas), sorted(on_workers)]))
    model = compiled(strategy, 0.1)
    epochs = 100 if config["kind"] == "stopped" else 3
    history = model.fit(line(), epochs=epochs, callbacks=callbacks, verbose=False)
    (folder / "losses").write_text(json.dumps(history.history["loss"]))


def stops_third_epoch(trial_id: str, result: dict[str, Any]) -> bool:
    return bool(result["config"]["kind"] == "stopped" and result["training_iteration"] == 3)


@pytest.mark.long
def test_trials_resume_after_failures_and_leave_nothing_when_they_end_or_are_stopped(
    ray_cluster: None, tmp_path: Path
) -> None:
    with rd.OneDeviceStrategy("cpu") as strategy:
        losses = compiled(strategy, 0.1).fit(line(), epochs=3, verbose=False).history["loss"]
    trainable = rd.tune.trainable(
        train_line,
        strategy=lambda n, **options: Marked(tmp_path, n, **options),
        num_input_workers=1,
        resources_per_input_worker=SMALL,
        **PLACES,
    )
    space = {"kind": tune.grid_search(["fails", "stopped"]), "folder": str(tmp_path)}
    results = results_of(
        trainable,
        tmp_path / "results",
        space,
        tune.TuneConfig(),
        failure_config=tune.FailureConfig(max_failures=1),
        stop=stops_third_epoch,
    )
    assert not results.errors
    last = [(result.metrics["training_iteration"], result.metrics["loss"]) for result in results]
    assert last == [(3, pytest.approx(losses[-1]))] * 2
    assert json.loads((tmp_path / "losses").read_text()) == pytest.approx(losses)
    assert (tmp_path / "epochs").read_text() == "0122", "it goes on from its last checkpoint"
    assert len(list(tmp_path.glob("closed-*"))) == 2, "a trial ends when its strategy is closed"
    (driver,), on_replicas, on_workers = json.loads((tmp_path / "groups").read_text())
    assert driver not in ("", "None")
    assert (on_replicas, on_workers) == ([driver], [driver])


def train_digits(config: dict[str, Any], strategy: rd.Strategy) -> None:
    rows = rd.load("digits", "train", as_supervised=True).shuffle(2000, seed=0, reshuffle_each_iteration=False)
    train, test = rows.skip(360).cache(), rows.take(360).cache()
    torch.manual_seed(0)
    with strategy.scope():
        module = nn.Sequential(
            *(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
        model = rd.Model(module)
        model.compile(
            torch.optim.AdamW(module.parameters(), lr=config["lr"]),
            nn.CrossEntropyLoss(),
            metrics=[MulticlassAccuracy(10, average="micro")],
        )
    batches = train.shuffle(2000, seed=0).batch(64).map(scaled)
    report = rd.TuneReportCallback({"accuracy": "val_multiclass_accuracy"})
    model.fit(batches, validation_data=test.batch(128).map(scaled), epochs=9, callbacks=[report], verbose=False)


def scaled(images: Any, labels: Any) -> Any:
    return images.astype("float32") / 16, labels


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_asha_finds_a_good_learning_rate_and_stops_bad_ones(ray_cluster: None, tmp_path: Path) -> None:
    rates = [1e-2, 1e-6, 2e-2, 1e-5, 1e-4, 3e-6, 1.5e-2, 3e-5, 1.0, 3e-2, 3e-4, 0.3]
    scheduler = ASHAScheduler(max_t=9, grace_period=1, reduction_factor=3)
    config = tune.TuneConfig(metric="accuracy", mode="max", scheduler=scheduler, max_concurrent_trials=2)
    trainable = rd.tune.trainable(train_digits, **PLACES)
    results = results_of(trainable, tmp_path, {"lr": tune.grid_search(rates)}, config)
    assert not results.errors
    assert len(results) == 12
    epochs = [result.metrics["training_iteration"] for result in results]
    assert (min(epochs), max(epochs)) == (1, 9), "ASHA stopped some"
    best = max(max(result.metrics_dataframe["accuracy"]) for result in results)
    print(f"best accuracy {best:.4f}, epochs {sorted(epochs)}")
    assert best >= 0.97


def train_with_rate(config: dict[str, Any], strategy: rd.Strategy) -> None:
    file = Path(config["folder"]) / tune.get_context().get_trial_id()

    def record(epoch: int, logs: dict[str, Any]) -> None:  # Tune's files may lack rows of trials that were paused
        with file.open("a") as opened:
            opened.write(f"{epoch} {config['lr']} {logs['loss']}\n")

    model = compiled(strategy, config["lr"])
    rate = rd.LearningRateScheduler(lambda epoch, _: config["lr"])
    callbacks = [rd.TuneReportCallback(), rate, rd.LambdaCallback(on_epoch_end=record)]
    model.fit(line(), epochs=6, callbacks=callbacks, verbose=False)


@pytest.mark.long
@pytest.mark.parametrize("reuse_actors", [False, True])
def test_population_based_training_goes_on_with_the_weights_of_another_trial(
    ray_cluster: None, tmp_path: Path, reuse_actors: bool
) -> None:
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=3,
        quantile_fraction=0.5,
        resample_probability=0,
        hyperparam_mutations={"lr": tune.uniform(0.0, 1.0)},
        synch=True,
    )
    config = tune.TuneConfig(metric="loss", mode="min", scheduler=scheduler, reuse_actors=reuse_actors)
    trainable = rd.tune.trainable(train_with_rate, **PLACES)
    folder = tmp_path / "records"
    folder.mkdir()
    space = {"lr": tune.grid_search([1e-5, 0.05]), "folder": str(folder)}
    assert not results_of(trainable, tmp_path / "results", space, config).errors
    texts = [path.read_text() for path in folder.iterdir()]
    records = [[[float(word) for word in row.split()] for row in text.splitlines()] for text in texts]
    (epochs, bad_rates, bad), (epochs_of_good, _, good) = (zip(*rows, strict=True) for rows in sorted(records))
    assert epochs == epochs_of_good == (0, 1, 2, 3, 4, 5)
    assert bad_rates[:3] == (1e-5,) * 3
    # After three epochs it goes on from the weights of the other one, with a rate of its own.
    assert bad[3] < good[2] < bad[2]
    assert bad_rates[3] in (pytest.approx(0.05 * 1.2), pytest.approx(0.05 * 0.8))


@pytest.mark.long
def test_an_actor_is_used_by_one_trial_after_another(ray_cluster: None, tmp_path: Path) -> None:
    """Tune stops the first trial while it waits in a report, and the second one after it has ended."""
    trainable = rd.tune.trainable(train_line, strategy=lambda n, **options: Marked(tmp_path, n, **options), **PLACES)
    space = {"kind": tune.grid_search(["stopped", "whole"]), "folder": str(tmp_path), "again": tune.grid_search([0, 1])}
    config = tune.TuneConfig(reuse_actors=True, max_concurrent_trials=1)
    results = results_of(trainable, tmp_path / "results", space, config, stop=stops_third_epoch)
    assert not results.errors
    assert [result.metrics["training_iteration"] for result in results] == [3] * 4
    assert len({result.metrics["pid"] for result in results}) == 1
    assert len(list(tmp_path.glob("closed-*"))) == 4


def report_each_three_batches(config: dict[str, Any], strategy: rd.Strategy) -> None:
    callback = rd.TuneReportCallback(["loss"], report_freq=3, save_checkpoints=False)
    compiled(strategy, 0.1).fit(line(), epochs=2, callbacks=[callback], verbose=False)
    if config["wrong"]:
        compiled(strategy, 0.1).fit(line(), callbacks=[rd.TuneReportCallback("accuracy")], verbose=False)


@pytest.mark.long
def test_reports_after_so_many_batches_and_names_logs_that_are_missing(ray_cluster: None, tmp_path: Path) -> None:
    trainable = rd.tune.trainable(
        report_each_three_batches, strategy=lambda n: rd.OneDeviceStrategy("cpu"), driver_resources=SMALL
    )
    results = results_of(trainable, tmp_path, {"wrong": tune.grid_search([False, True])}, tune.TuneConfig())
    assert [len(result.metrics_dataframe) for result in results] == [2, 2]  # of 8 batches
    assert [result.checkpoint for result in results] == [None, None]
    (error,) = results.errors
    assert "metrics must name numbers that fit logs, which are ['loss'], got ['accuracy']" in str(error)


def test_wrong_arguments_and_a_fit_without_a_trial_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="num_replicas must be an integer >= 1, got 0"):
        rd.tune.trainable(train_line, num_replicas=0)
    with pytest.raises(rd.InvalidArgumentError, match="strategy must be a function"):
        rd.tune.trainable(train_line, strategy="mirrored")  # type: ignore[arg-type]
    with pytest.raises(rd.InvalidArgumentError, match='report_freq must be "epoch" or a number of batches'):
        rd.TuneReportCallback(report_freq=0)
    with rd.OneDeviceStrategy("cpu") as strategy:
        model = compiled(strategy, 0.1)
        with pytest.raises(rd.FailedPreconditionError, match="and this process runs none"):
            model.fit(line(), callbacks=[rd.TuneReportCallback()], verbose=False)
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    with pytest.raises(rd.FailedPreconditionError, match=r"pip install 'raydist\[tune\]'"):
        rd.tune.trainable(train_line)
