from __future__ import annotations

import pytest
import torch
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

import raydist as rd
from raydist.training.trackers import LossTotal, RowCount, Trackers, named_metrics


def test_metrics_are_named_by_their_class_and_numbered() -> None:
    names = list(named_metrics([MeanSquaredError(), BinaryAUROC(), MeanSquaredError(), MeanSquaredError()]))
    assert names == ["mean_squared_error", "binary_auroc", "mean_squared_error_1", "mean_squared_error_2"]


def test_a_dict_a_collection_and_a_single_metric_are_fine() -> None:
    metric = MeanSquaredError()
    assert named_metrics({"mse": metric}) == {"mse": metric}
    assert list(named_metrics(MetricCollection({"mse": metric}))) == ["mse"]
    assert named_metrics(metric) == {"mean_squared_error": metric}
    assert named_metrics(()) == {}


def test_other_metrics_are_refused() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"torchmetrics.Metric objects, got str for 'str'"):
        named_metrics(["accuracy"])
    with pytest.raises(rd.InvalidArgumentError, match='can not be named "loss"'):
        named_metrics({"loss": MeanSquaredError()})


def test_counts_rows_and_weighted_loss_until_reset() -> None:
    trackers = Trackers(LossTotal(), RowCount(), {"mse": MeanSquaredError()})
    trackers.update(torch.tensor(3.0), 3, 3)
    trackers.update(torch.tensor(5.0), 1, 1)
    trackers.metrics["mse"].update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    assert trackers.rows_and_logs() == (4, {"loss": 2.0, "mse": 2.0})
    trackers.reset()
    trackers.update(torch.tensor(14.0), 2, 2)
    trackers.metrics["mse"].update(torch.tensor([1.0]), torch.tensor([1.0]))
    assert trackers.rows_and_logs() == (2, {"loss": 7.0, "mse": 0.0})


def test_a_sum_is_divided_by_nothing() -> None:
    trackers = Trackers(LossTotal(is_sum=True), RowCount(), {})
    trackers.update(torch.tensor(3.0), 0, 3)
    trackers.update(torch.tensor(5.0), 0, 1)
    assert trackers.read() == {"loss": 8.0}


def test_a_metric_of_several_numbers_is_logged_as_a_tensor() -> None:
    trackers = Trackers(LossTotal(), RowCount(), {"per_class": MulticlassAccuracy(2, average=None)})
    trackers.update(torch.tensor(0.0), 2, 2)
    trackers.metrics["per_class"].update(torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert trackers.read()["per_class"].tolist() == [0.5, 0.0]
