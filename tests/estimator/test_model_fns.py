"""Estimators of a model_fn: they train what a bare loop trains, and go on from what is in their directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanSquaredError

import raydist as rd
from tests.summary.reading import curves
from tests.training.toys import (
    At,
    bare_loop,
    batches_of,
    interrupt,
    regression,
    regression_arrays,
    small_net,
    terminate,
)

ROWS, BATCH_SIZE = 29, 8  # 4 batches, the last of 5 rows
PARAMS = {"lr": 0.1}


def model_fn(features: torch.Tensor, labels: torch.Tensor, mode: str, params: dict[str, float]) -> rd.EstimatorSpec:
    net = rd.get_or_create("net", small_net)
    outputs = net(features)
    if mode == rd.ModeKeys.PREDICT:
        return rd.EstimatorSpec(mode, predictions={"y": outputs, "twice": 2 * outputs})
    loss = F.mse_loss(outputs, labels)
    if mode == rd.ModeKeys.EVAL:
        error, mean = rd.get_or_create("error", MeanSquaredError), rd.get_or_create("mean", rd.Mean)
        return rd.EstimatorSpec(
            mode, loss=loss, eval_metric_ops={"mse": (error, outputs, labels), "mean": (mean, labels)}
        )
    sgd = rd.get_or_create("sgd", lambda: torch.optim.SGD(net.parameters(), lr=params["lr"]))
    return rd.EstimatorSpec(mode, loss=loss, optimizer=sgd)


def data(repeats: int | None = 1) -> rd.Dataset:
    return regression(ROWS, BATCH_SIZE).repeat(repeats)


def config_of(strategy: rd.Strategy, **settings: Any) -> rd.RunConfig:
    return rd.RunConfig(train_distribute=strategy, tf_random_seed=1, **settings)


def bare(epochs: int) -> nn.Module:
    """The net after a bare loop."""
    net = small_net()
    bare_loop(net, batches_of(regression_arrays(ROWS), BATCH_SIZE), epochs)
    return net


def variables(estimator: Any, prefix: str = "net.") -> dict[str, torch.Tensor]:
    """The variables of the newest checkpoint."""
    found = {}
    for path in sorted(Path(estimator.latest_checkpoint()).glob("model*.safetensors")):
        found.update(load_file(path))
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


def check_same(found: dict[str, torch.Tensor], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_training_is_a_bare_loop(strategy: rd.Strategy, tmp_path: Path) -> None:
    estimator = rd.Estimator(model_fn, tmp_path, config_of(strategy, save_checkpoints_steps=3), PARAMS)
    assert estimator.train(lambda: data(2)) is estimator
    expected = bare(2)
    check_same(variables(estimator), expected.state_dict())
    assert sorted(path.name for path in tmp_path.glob("ckpt*")) == ["ckpt-3", "ckpt-6", "ckpt-8"]

    x, y = map(torch.from_numpy, regression_arrays(ROWS))
    found = estimator.evaluate(data)
    with torch.no_grad():
        wanted = expected(x)
    error = F.mse_loss(wanted, y).item()
    assert found == pytest.approx({"loss": error, "mse": error, "mean": y.mean().item(), "global_step": 8}, rel=1e-6)
    assert dict(curves(tmp_path / "eval").scalars("mse")) == pytest.approx({8: error}, rel=1e-6)

    rows = list(estimator.predict(data, predict_keys="y"))
    torch.testing.assert_close(torch.stack([row["y"] for row in rows]), wanted, rtol=1e-9, atol=1e-12)
    batches = list(estimator.predict(lambda: data().map(lambda x, y: x), yield_single_examples=False))
    torch.testing.assert_close(torch.cat([batch["twice"] for batch in batches]), 2 * wanted, rtol=1e-9, atol=1e-12)


def test_training_goes_on_and_ends_at_steps(tmp_path: Path) -> None:
    def made() -> rd.Estimator:
        return rd.Estimator(model_fn, tmp_path, rd.RunConfig(save_summary_steps=1), PARAMS)

    def step() -> int:
        return int(made().evaluate(data)["global_step"])

    made().train(data, max_steps=4)  # all data
    check_same(variables(made()), bare(1).state_dict())
    made().train(lambda: data(None), steps=3)
    assert step() == 7
    made().train(data, max_steps=8)
    made().train(data, max_steps=8)
    assert step() == 8
    made().train(data)  # data begin anew, the model does not
    assert step() == 12
    assert sorted(at for at, _ in curves(tmp_path).scalars("loss")) == list(range(1, 13))
    assert made().evaluate(data, steps=1)["mean"] == pytest.approx(regression_arrays(ROWS)[1][:BATCH_SIZE].mean())
    first = made().evaluate(data, checkpoint_path=str(tmp_path / "ckpt-4"), name="first")
    assert first["global_step"] == 4
    assert curves(tmp_path / "eval_first").names("scalars") == {"loss", "mean", "mse"}


@pytest.mark.parametrize("limit", [{"steps": 7}, {"max_steps": 7}])
def test_interrupted_training_is_completed(strategy: rd.Strategy, tmp_path: Path, limit: Any) -> None:
    def shuffled() -> rd.Dataset:
        return rd.Dataset.from_tensor_slices(regression_arrays(ROWS)).shuffle(20, seed=4).batch(BATCH_SIZE).repeat()

    config = config_of(strategy, save_checkpoints_steps=2)
    rd.Estimator(model_fn, tmp_path / "whole", config, PARAMS).train(shuffled, **limit)
    broken = rd.Estimator(model_fn, tmp_path / "broken", config, PARAMS)
    with pytest.raises(KeyboardInterrupt):
        broken.train(shuffled, [At("on_train_batch_end", 6, interrupt)], **limit)
    broken.train(shuffled, **limit)
    assert broken.latest_checkpoint() == str(tmp_path / "broken" / "ckpt-7")
    check_same(variables(broken), variables(rd.Estimator(model_fn, tmp_path / "whole")))


def parts_fn(features: Any, labels: Any, mode: str) -> rd.EstimatorSpec:
    """A model with variables of all kinds, batch norm, and two optimizers."""
    net = rd.get_or_create("net", lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double())
    scale = rd.get_or_create("scale", lambda: nn.Parameter(torch.ones(1, dtype=torch.float64)))
    calls = rd.get_or_create("calls", lambda: torch.zeros(()))
    calls += mode == rd.ModeKeys.TRAIN and torch.is_grad_enabled()
    outputs = net(features["x"]).sum(1, keepdim=True) * scale
    sgd = rd.get_or_create("sgd", lambda: torch.optim.SGD(net.parameters(), lr=0.1))
    adam = rd.get_or_create("adam", lambda: torch.optim.Adam([scale], lr=0.1))
    loss = (outputs - labels).square().sum(), len(labels)
    return rd.EstimatorSpec(mode, outputs, loss, optimizer=[sgd, adam], clip_norm=1.0)


def named() -> rd.Dataset:
    return regression(16, 8).map(lambda x, y: ({"x": x}, y))


def test_variables_of_all_kinds_and_two_optimizers(tmp_path: Path) -> None:
    estimator = rd.Estimator(parts_fn, tmp_path, rd.RunConfig(tf_random_seed=5)).train(lambda: named().repeat(2))
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizers = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.Adam([scale], lr=0.1)
    for x, y in [*regression(16, 8)] * 2:
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.mse_loss(net(x).sum(1, keepdim=True) * scale, y).backward()
        nn.utils.clip_grad_norm_([*net.parameters(), scale], 1.0)
        for optimizer in optimizers:
            optimizer.step()
    check_same(variables(estimator), net.state_dict())
    assert variables(estimator, "scale")[""].item() == pytest.approx(scale.item(), rel=1e-9)
    assert variables(estimator, "calls")[""] == 4
    estimator.train(named)  # the state of both optimizers is restored


@pytest.mark.ray
def test_every_worker_has_a_dataset_from_input_context(mirrored: Any) -> None:
    seen: list[rd.InputContext] = []

    def input_fn(input_context: rd.InputContext, params: dict[str, float]) -> rd.Dataset:
        seen.append(input_context)
        assert params == PARAMS
        return regression(ROWS, input_context.get_per_replica_batch_size(9))

    estimator = rd.Estimator(model_fn, config=config_of(mirrored(3)), params=PARAMS)
    assert estimator.train(input_fn, max_steps=2).evaluate(data)["global_step"] == 2
    assert {context.num_replicas_in_sync for context in seen} == {3}


class Evaluated(rd.Callback):
    """Collects the results of evaluations."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_test_end(self, logs: dict[str, Any]) -> None:
        self.losses.append(logs["loss"])


@pytest.mark.parametrize(("throttle", "times"), [(0, 4), (1000, 2)])
def test_checkpoints_are_evaluated_as_they_come(
    strategy: rd.Strategy, tmp_path: Path, throttle: float, times: int
) -> None:
    estimator = rd.Estimator(model_fn, tmp_path, config_of(strategy, save_checkpoints_steps=2), PARAMS)
    seen = Evaluated()
    evaluation = rd.EvalSpec(data, hooks=[seen], throttle_secs=throttle)
    results = rd.train_and_evaluate(estimator, rd.TrainSpec(lambda: data(None), max_steps=7), evaluation)
    assert results["global_step"] == 7
    assert len(seen.losses) == times
    check_same(variables(estimator), variables(rd.Estimator(model_fn, tmp_path)))
    alone = rd.Estimator(model_fn, tmp_path / "alone", config_of(strategy), PARAMS).train(lambda: data(None), steps=7)
    check_same(variables(estimator), variables(alone))
    assert seen.losses == pytest.approx(
        [estimator.evaluate(data, checkpoint_path=str(tmp_path / f"ckpt-{step}"))["loss"] for step in (2, 4, 6, 7)]
        if times == 4
        else [seen.losses[0], alone.evaluate(data)["loss"]]
    )


def test_a_program_that_is_told_to_end_while_it_evaluates_goes_on(tmp_path: Path) -> None:
    estimator = rd.Estimator(model_fn, tmp_path / "run", rd.RunConfig(save_checkpoints_steps=2), PARAMS)
    training = rd.TrainSpec(lambda: data(None), max_steps=7)
    told = At("on_test_batch_end", 6, terminate)
    with pytest.raises(rd.Preempted):
        rd.train_and_evaluate(estimator, training, rd.EvalSpec(data, hooks=[told], throttle_secs=0))
    assert estimator.latest_checkpoint() == str(tmp_path / "run" / "ckpt-4")
    assert rd.train_and_evaluate(estimator, training, rd.EvalSpec(data))["global_step"] == 7
    alone = rd.Estimator(model_fn, tmp_path / "alone", params=PARAMS).train(lambda: data(None), steps=7)
    check_same(variables(estimator), variables(alone))


@pytest.mark.ray
def test_parameter_servers_count_steps(served: Any, tmp_path: Path) -> None:
    estimator = rd.Estimator(model_fn, tmp_path, config_of(served(1), save_checkpoints_steps=4), PARAMS)
    for steps in (6, 10):
        estimator.train(lambda: data(None), max_steps=steps)
        assert estimator.evaluate(data)["global_step"] == steps
        assert estimator.latest_checkpoint() == str(tmp_path / f"ckpt-{steps}")


def test_a_data_loader_is_input(tmp_path: Path) -> None:
    rows = torch.utils.data.TensorDataset(*map(torch.from_numpy, regression_arrays(ROWS)))
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH_SIZE)
    estimator = rd.Estimator(model_fn, tmp_path, params=PARAMS).train(lambda: loader)
    check_same(variables(estimator), bare(1).state_dict())


def test_a_compiled_model_becomes_an_estimator(strategy: rd.Strategy, tmp_path: Path) -> None:
    with strategy.scope():
        net = small_net()
        model = rd.Model(net)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        model.compile(sgd, "mse", metrics={"mse": MeanSquaredError()})
    estimator = rd.model_to_estimator(model, tmp_path, rd.RunConfig(save_checkpoints_steps=2))
    results = rd.train_and_evaluate(estimator, rd.TrainSpec(lambda: data(2)), rd.EvalSpec(data, throttle_secs=0))
    expected = bare(2)
    check_same(variables(estimator, ""), expected.state_dict())
    x, y = map(torch.from_numpy, regression_arrays(ROWS))
    with torch.no_grad():
        wanted = expected(x)
    assert results["mse"] == pytest.approx(F.mse_loss(wanted, y).item(), rel=1e-6)
    found = torch.stack([row["predictions"] for row in estimator.predict(data)])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    with pytest.raises(rd.InvalidArgumentError, match="must not name a strategy"):
        rd.model_to_estimator(model, config=rd.RunConfig(train_distribute=strategy))


def late_fn(features: Any, labels: Any, mode: str) -> rd.EstimatorSpec:
    """Asks for another module in steps only."""
    net = rd.get_or_create("net" if not torch.is_grad_enabled() else "other", small_net)
    sgd = rd.get_or_create("sgd", lambda: torch.optim.SGD(net.parameters(), lr=0.1))
    return rd.EstimatorSpec(mode, loss=F.mse_loss(net(features), labels), optimizer=sgd)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(rd.FailedPreconditionError, match="must be called in the model_fn of an estimator"):
        rd.get_or_create("net", small_net)
    with pytest.raises(rd.FailedPreconditionError, match="'other' was asked for in a step only"):
        rd.Estimator(late_fn).train(data)

    def misnamed(features: Any) -> Any:
        rd.get_or_create("a.b", small_net)

    with pytest.raises(rd.InvalidArgumentError, match=r"without '\.' and no attribute's, got 'a\.b'"):
        rd.Estimator(misnamed).train(data)
    with pytest.raises(rd.SpecError, match="must return an rd.EstimatorSpec, got NoneType"):
        rd.Estimator(lambda features: None).train(data)  # type: ignore[arg-type,return-value]
    with pytest.raises(rd.InvalidArgumentError, match="for mode 'train' must have optimizer, got None"):
        rd.EstimatorSpec(rd.ModeKeys.TRAIN, loss=torch.ones(()))
    estimator = rd.Estimator(model_fn, params=PARAMS)
    with pytest.raises(rd.InvalidArgumentError, match="Give steps or max_steps, got 1 and 2"):
        estimator.train(data, steps=1, max_steps=2)
    with pytest.raises(rd.SpecError, match="must return an rd.Dataset of batches or a DataLoader, got ndarray"):
        estimator.train(lambda: np.zeros(3))
    with pytest.raises(rd.InvalidArgumentError, match="must have at least one batch, got none"):
        estimator.train(lambda: data().take(0))
    with pytest.raises(rd.InvalidArgumentError, match=r"among the predictions \['y', 'twice'\], got 'z'"):
        next(estimator.predict(data, predict_keys=["z"]))
    with pytest.raises(rd.InvalidArgumentError, match="Give save_checkpoints_steps or save_checkpoints_secs"):
        rd.RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1)
    with pytest.raises(rd.InvalidArgumentError, match="Give one model_dir, got 'a' and RunConfig's 'b'"):
        rd.Estimator(model_fn, "a", rd.RunConfig("b"))
