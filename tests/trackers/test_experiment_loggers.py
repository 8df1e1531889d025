"""`rd.WandbLogger` and `rd.MLflowLogger` with the real packages, without a network."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest

import raydist as rd
from tests.training.toys import compiled, regression, small_net


def train(logger: rd.Callback, epochs: int, checkpoint: Path) -> None:
    with rd.OneDeviceStrategy("cpu").scope():
        model = compiled(small_net())
    model.fit(regression(8, 4), epochs=epochs, callbacks=[logger], checkpoint=checkpoint, verbose=False)


def test_mlflow_has_one_run_across_a_restart(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/runs.db"
    for epochs in (1, 2):
        train(rd.MLflowLogger("digits", params={"lr": 0.1}, tracking_uri=uri), epochs, tmp_path / "checkpoints")
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "0.1"})
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == [2, 4]


@pytest.mark.timeout(120)
def test_wandb_has_one_run_across_a_restart(tmp_path: Path) -> None:
    for epochs in (1, 2):
        train(rd.WandbLogger("digits", mode="offline", dir=str(tmp_path)), epochs, tmp_path / "checkpoints")
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    assert len({run.name.rpartition("-")[2] for run in runs}) == 1  # two parts of one run, as `wandb sync` joins them
