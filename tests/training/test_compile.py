"""Models and `compile`: optimizers, losses, metrics, elements of datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassAUROC
from torchmetrics.wrappers import ClasswiseWrapper

import raydist as rd
from raydist.training.elements import ClassWeights, Example, forward, unpack
from raydist.training.sidecar_evaluator import Evaluated
from raydist.training.steps import guessing
from raydist.training.trackers import LossTotal, RowCount, Trackers, named_metrics
from tests.refused import check_refused
from tests.training.toys import column, compiled, line, regression, small_net


def test_compile_checks_its_arguments() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": 0.1}, "optimizer must be a torch.optim.Optimizer, got 0.1"),
        ({"loss": 3}, r"loss must be callable as loss\(prediction, target\), got 3"),
        ({"optimizer": "sdg"}, "optimizer must be one of torch's classes .* got 'sdg'. Did you mean 'SGD'.*AdamW, "),
        ({"loss": "mean_squared_error"}, "loss must be one of torch's classes .* got 'mean_squared_error'.*MSELoss, "),
        ({"steps_per_execution": 0}, "steps_per_execution must be >= 1, got 0"),
        ({"metrics": ["accuracy"]}, "metrics must be torchmetrics.Metric objects, got str for 'str'"),
        ({"metrics": {"loss": MeanSquaredError()}}, 'can not be named "loss"'),
        ({"clip_norm": 0.0}, "clip_norm must be > 0 or None, got 0.0"),
        ({"accumulate_steps": 0}, "accumulate_steps must be >= 1, got 0"),
        ({"precision": "fp8"}, 'precision must be "bf16", "fp16" or None, got \'fp8\''),
        ({"loss_reduction": "rows"}, 'loss_reduction must be "mean", "sum" or None'),
    ]
    check_refused(lambda settings: compiled(line(), **settings), cases)
    net, other = line(), nn.Linear(5, 2)
    optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
    told = r"2 of its 3 are not among them, the first has the shape \(2, 5\)"
    check_refused(lambda optimizer: compiled(net, optimizer=optimizer), [(optimizer, told)])
    model = rd.Model(small_net())
    calls: list[Any] = [lambda: model.fit(regression(4, 4)), lambda: model.evaluate(regression(4, 4))]
    told = r"must be compiled first: model.compile\(optimizer, loss\)"
    for call in (*calls, lambda: model.optimizer):
        check_refused(lambda call: call(), [(call, told)], rd.FailedPreconditionError)


def test_compiling_again_replaces_everything() -> None:
    net = line()
    model = compiled(net)
    model.compile(torch.optim.SGD(net.parameters(), lr=0.0), nn.L1Loss())
    data = rd.Dataset.from_tensor_slices((column([1, 1]), column([1, 1]))).batch(2)
    history = model.fit(data, verbose=False)
    assert history.history["loss"] == [1.0]
    assert net.weight.item() == 0.0


def test_what_is_written_here_alone_is_not_at_a_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    uses: list[Callable[[str], Any]] = [rd.summary.create_file_writer, rd.TensorBoard, rd.CSVLogger]
    for use in uses:
        with pytest.raises(rd.InvalidArgumentError, match="must be on a disk of this machine") as found:
            use("s3://key:hidden@bucket/file?sig=hidden")
        assert "hidden" not in str(found.value), use
    assert not list(tmp_path.iterdir())  # of a directory "s3:"


def test_credentials_are_shown_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    uri = "memory://key:hidden@bucket/file?sig=hidden"
    model = compiled(small_net())
    model.fit(regression(4, 4), callbacks=[rd.ModelCheckpoint(uri, verbose=1)], verbose=False)
    with pytest.raises(rd.InvalidArgumentError, match="filepath may name epoch") as found:
        model.fit(regression(4, 4), callbacks=[rd.ModelCheckpoint(f"{uri}{{typo}}")], verbose=False)
    told = (capsys.readouterr().out, str(found.value), repr(Evaluated(uri, 3, {"loss": 0.5})))
    assert all("memory://***@bucket/file?***" in each and "hidden" not in each for each in told)


def test_metrics_have_names_and_are_read() -> None:
    names = list(named_metrics([MeanSquaredError(), BinaryAUROC(), MeanSquaredError(), MeanSquaredError()]))
    assert names == ["mean_squared_error", "binary_auroc", "mean_squared_error_1", "mean_squared_error_2"]
    metric = MeanSquaredError()
    assert named_metrics({"mse": metric}) == {"mse": metric}
    assert list(named_metrics(MetricCollection({"mse": metric}))) == ["mse"]
    assert named_metrics(metric) == {"mean_squared_error": metric}
    assert named_metrics(()) == {}
    trackers = Trackers(LossTotal(), RowCount(), {"per_class": MulticlassAccuracy(2, average=None)})
    trackers.update(torch.tensor(0.0), 2, 2)
    trackers.metrics["per_class"].update(torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert trackers.read()["per_class"].tolist() == [0.5, 0.0], "of several numbers"
    metrics = {
        "auroc": BinaryAUROC(),
        "accuracy": MulticlassAccuracy(3),
        "mse": MeanSquaredError(),
        "classes": ClasswiseWrapper(MulticlassAUROC(3, average=None)),
        "ignores": MulticlassAUROC(3, ignore_index=0),
    }
    assert guessing(metrics) == {"auroc": False, "classes": False, "ignores": True}


def test_unpack_refuses_other_elements() -> None:
    cases = {"a single int": 5, "a tuple of 1": (1,), "a tuple of 4": (1, 2, 3, 4), "a dict": {"x": 1}}
    told = r"\(x, y\) or \(x, y, sample_weight\), got {}.* dataset\.map"
    check_refused(unpack, [(element, told.format(got)) for got, element in cases.items()], rd.SpecError)


def test_rows_weigh_by_their_class() -> None:
    weights = ClassWeights.parse({1: 5.0, 2: 0})
    for y in (torch.tensor([0, 1, 2]), torch.tensor([[0.0], [1.0], [2.0]]), torch.eye(3)):
        assert weights.of(y).tolist() == [1.0, 5.0, 0.0]
        assert weights.weigh(Example("x", y)).sample_weight.tolist() == [1.0, 5.0, 0.0]
    others: list[Any] = [{}, [1.0, 2.0], {"cat": 1.0}, {-1: 1.0}, {0: -1.0}, {0: float("nan")}, {0: "heavy"}, {0: None}]
    check_refused(ClassWeights.parse, [(given, "class_weight must") for given in others])
    targets = [(torch.ones(2, 2, 2), r"shape \(2, 2, 2\)"), ({"a": torch.ones(2)}, "dict")]
    told = "class_weight needs targets .* got "
    check_refused(ClassWeights.parse({0: 2.0}).of, [(y, told + got) for y, got in targets], rd.SpecError)


class Spy(nn.Module):
    """Notes the type in which it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        self.seen.add(y.dtype)
        return y


def data() -> rd.Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, 3)).astype(np.float32)
    return rd.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(4)


def test_the_forward_computes_in_bfloat16_wherever_a_model_is_used() -> None:
    net = Spy()
    model = compiled(net, precision="bf16", metrics={"mse": MeanSquaredError()})
    for use in (model.fit, model.evaluate, model.predict):
        net.seen.clear()
        use(data(), verbose=False)
        assert net.seen == {torch.bfloat16}
    assert net.inner.weight.dtype == torch.float32
    assert model.predict(data(), verbose=False).dtype == torch.float32


def test_outputs_of_any_form_are_widened() -> None:
    class Several(nn.Module):
        def forward(self, x: torch.Tensor) -> list[Any]:
            return [x @ x.T, {"length": torch.tensor(3)}]

    product, rest = forward(Several(), torch.ones(2, 2), "bf16")
    assert product.dtype == torch.float32
    assert rest["length"].dtype == torch.int64
    double = forward(nn.Identity(), torch.ones(2, dtype=torch.float64), "bf16")
    assert double.dtype == torch.float64
