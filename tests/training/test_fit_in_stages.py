"""`Model` under PipelineStrategy trains, evaluates and predicts what it does on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

import raydist as rd
from tests.shared_strategies import KeptStrategies

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

LIMITS = rd.Timeouts(start_s=60, collective_s=20, step_s=60, close_s=5)


def pipelines(num_devices: int, stages: int = 2) -> rd.PipelineStrategy:
    return rd.PipelineStrategy(
        stages, num_devices // 2, num_microbatches=3, timeouts=LIMITS, resources_per_replica={"CPU": 0.01}
    )


@pytest.fixture(params=[2, 4])
def in_stages(kept: KeptStrategies, request: pytest.FixtureRequest) -> rd.PipelineStrategy:
    """One pipeline of two stages, or two."""
    return kept.get(rd.PipelineStrategy, pipelines, request.param)


def masked(prediction: torch.Tensor, target: torch.Tensor) -> Any:
    counted = target != 0
    return (F.cross_entropy(prediction, target, reduction="none") * counted).sum(), counted.sum()


def halved(prediction: torch.Tensor, target: torch.Tensor) -> Any:
    return F.cross_entropy(prediction, target, ignore_index=2) / 2


LOSSES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "labels": (lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2, 4], dtype=torch.float64), ignore_index=1), {}),
    "rows": (lambda: nn.CrossEntropyLoss(reduction="none"), {"accumulate_steps": 2}),
    "pair": (lambda: masked, {"accumulate_steps": 3}),
    "sum": (lambda: nn.CrossEntropyLoss(reduction="sum"), {"clip_norm": 0.3}),
    "function": (lambda: halved, {"clip_norm": 0.3}),
    "weights": (lambda: "cross_entropy", {"scheduler": lambda it: torch.optim.lr_scheduler.ExponentialLR(it, 0.9)}),
}


def rows(*, weighted: bool = False) -> rd.Dataset:
    torch.manual_seed(5)
    x, y, weight = torch.randn(47, 4, dtype=torch.float64), torch.randint(0, 3, (47,)), torch.rand(47).double()
    return rd.Dataset.from_tensor_slices((x, y, weight) if weighted else (x, y)).batch(10)


def make(strategy: rd.Strategy, loss: Callable[[], Any], settings: dict[str, Any]) -> rd.Model:
    torch.manual_seed(3)
    with strategy.scope():
        layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        model = rd.Model(layers)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.05, momentum=0.9)
        model.compile(optimizer, loss(), metrics=[MulticlassAccuracy(3, average="micro")], **settings)
    return model


def outcome(strategy: rd.Strategy, name: str) -> list[torch.Tensor]:
    """Return parameters, logs and predictions."""
    loss, settings = LOSSES[name]
    model = make(strategy, loss, settings)
    data = rows(weighted=name == "weights")
    history = model.fit(data, epochs=2, validation_data=data, verbose=False).history
    logs = [torch.as_tensor(values, dtype=torch.float64) for _, values in sorted(history.items())]
    predictions = model.predict(data, verbose=False)
    return [*(each.detach().clone() for each in model.module.parameters()), *logs, predictions]


@pytest.mark.parametrize("name", LOSSES)
def test_fit_evaluate_and_predict_are_those_of_one_device(in_stages: rd.PipelineStrategy, name: str) -> None:
    expected, found = outcome(rd.OneDeviceStrategy("cpu"), name), outcome(in_stages, name)
    assert len(found) == 6 + 4 + 1
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-9)


def test_fit_continues_from_a_checkpoint_of_another_strategy(in_stages: rd.PipelineStrategy, tmp_path: Path) -> None:
    alone = rd.OneDeviceStrategy("cpu")

    def fit(strategy: rd.Strategy, path: str, epochs: int) -> dict[str, torch.Tensor]:
        model = make(strategy, lambda: "cross_entropy", {})
        model.fit(rows(), epochs=epochs, verbose=False, checkpoint=tmp_path / path)
        return {name: each.clone() for name, each in model.module.state_dict().items()}

    expected = fit(alone, "whole", 3)
    fit(in_stages, "stages", 1)
    fit(alone, "one", 1)
    for strategy, path in ((in_stages, "one"), (alone, "stages")):
        found = fit(strategy, path, 3)
        assert all(torch.allclose(each, found[name], rtol=0, atol=1e-9) for name, each in expected.items())


@pytest.mark.parametrize(
    ("loss", "settings", "said"),
    [
        ("model", {}, "must be a function of .prediction, target., .* got loss='model'"),
        ("mse", {"precision": "fp16"}, "precision .bf16. or None, .* precision='fp16'"),
        ("mse", {"steps_per_execution": 2}, "steps_per_execution 1, got .* steps_per_execution=2"),
    ],
)
def test_compile_refuses_what_stages_cannot_do(
    in_stages: rd.PipelineStrategy, loss: Any, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=said):
        make(in_stages, lambda: loss, settings)


def test_precision_is_that_of_the_layers(in_stages: rd.PipelineStrategy) -> None:
    with in_stages.scope():
        model = rd.Model(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)))
        model.compile("sgd", "cross_entropy", precision="bf16")
    data = rows().map(lambda x, y: (x.astype("float32"), y))
    predictions = model.predict(data, verbose=False)
    assert predictions.dtype is torch.float32
    assert torch.equal(predictions, predictions.bfloat16().float())
    before = [each.detach().clone() for each in model.module.parameters()]
    model.fit(data, verbose=False)
    assert not any(map(torch.equal, before, model.module.parameters()))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda prediction, target: F.cross_entropy(prediction, target).sqrt(), "needs a loss that is one mean"),
        (lambda prediction, target: (prediction[:, 0] - target).square().sum(), "must return a mean over its rows"),
    ],
)
def test_losses_that_microbatches_cannot_share_are_errors(ray_cluster: None, loss: Any, said: str) -> None:
    with pipelines(2, stages=1) as strategy:
        model = make(strategy, lambda: loss, {})
        with pytest.raises(rd.InvalidArgumentError, match=said):
            model.fit(rows(), verbose=False)


def test_a_gradient_scaler_is_an_error(ray_cluster: None) -> None:
    with pipelines(2) as strategy:
        with strategy.scope():
            module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu")

        def step() -> Any:
            loss = rd.get_replica_context().pipeline_step((torch.ones(4, 4), None), lambda out, _: out.mean(), module)
            scaler.step(optimizer)
            return loss

        with pytest.raises(rd.InvalidArgumentError, match="GradScaler does not scale gradients of a pipeline"):
            float(strategy.run(step))
