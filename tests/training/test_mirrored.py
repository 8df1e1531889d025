"""`rd.Model` on several replicas gives the numbers of one replica."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError, PearsonCorrCoef
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryF1Score

import raydist as rd
from tests.training.toys import Recorder, line, regression, regression_arrays, small_net

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

BATCH = 4
# One row, and a last batch of one row, and of two; in one step a call and in two.
SIZES = [(1, 2), (5, 1), (6, 2)]


@pytest.fixture
def three(mirrored: Callable[[int], rd.MirroredStrategy]) -> rd.Strategy:
    return mirrored(3)


def built(strategy: rd.Strategy, make_net: Callable[[], nn.Module] = small_net, **settings: Any) -> rd.Model:
    """A compiled model of `strategy`; `loss`, `metrics` (a function) and `steps_per_execution` may be given."""
    with strategy.scope():
        model = rd.Model(make_net())
        metrics = settings.pop("metrics", tuple)()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model.compile(optimizer, settings.pop("loss", nn.MSELoss()), metrics, **settings)
    return model


def state(model: rd.Model) -> dict[str, np.ndarray[Any, Any]]:
    return {name: value.detach().numpy().copy() for name, value in model.module.state_dict().items()}


def assert_same(found: Any, expected: Any, case: Any = "") -> None:
    assert found.keys() == expected.keys(), case
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-15, err_msg=f"{name} {case}")


def check_same(strategy: rd.Strategy, trained: Callable[[rd.Strategy], tuple[Any, ...]], case: Any = "") -> None:
    """Check that each part of the result is the same under `strategy` as on one device."""
    for found, expected in zip(trained(strategy), trained(rd.OneDeviceStrategy("cpu")), strict=True):
        assert_same(found, expected, case)


def weighted(num_rows: int) -> rd.Dataset:
    x, y = regression_arrays(num_rows)
    weights = np.arange(num_rows) % 3 + 0.5
    weights[: num_rows // 3] = 0.0
    return rd.Dataset.from_tensor_slices((x, y, weights)).batch(BATCH)


def test_fit_gives_the_same_parameters_and_history(three: rd.Strategy) -> None:
    for num_rows, steps_per_execution in SIZES:

        def trained(strategy: rd.Strategy, rows: int = num_rows, steps: int = steps_per_execution) -> tuple[Any, Any]:
            model = built(strategy, steps_per_execution=steps, metrics=lambda: {"mse": MeanSquaredError()})
            data = regression(rows, BATCH)
            history = model.fit(data, epochs=2, validation_data=regression(5, BATCH), verbose=False).history
            return state(model), history

        parameters, history = trained(three)
        expected_parameters, expected_history = trained(rd.OneDeviceStrategy("cpu"))
        assert_same(parameters, expected_parameters, num_rows)
        for name in ("loss", "val_loss"):
            np.testing.assert_allclose(history[name], expected_history[name], rtol=1e-9, err_msg=f"{num_rows}")
        for name in ("mse", "val_mse"):  # counted in float32
            np.testing.assert_allclose(history[name], expected_history[name], rtol=1e-5, err_msg=f"{num_rows}")
        assert not np.array_equal(parameters["0.weight"], state(rd.Model(small_net()))["0.weight"])


def test_weights_joined_batches_clipping_and_schedules_give_the_same(three: rd.Strategy) -> None:
    cases: list[tuple[rd.Dataset, int, dict[str, Any]]] = [
        *((weighted(rows), steps, {}) for rows, steps in SIZES),
        (regression(14, BATCH), 2, {"accumulate_steps": 2}),
        *((weighted(rows), steps, {"accumulate_steps": 2}) for rows, steps in ((9, 2), (14, 1))),
    ]
    for number, (data, steps_per_execution, settings) in enumerate(cases):
        if settings:
            settings |= {"clip_norm": 0.1, "scheduler": lambda it: torch.optim.lr_scheduler.StepLR(it, 1, gamma=0.5)}

        def trained(
            strategy: rd.Strategy,
            data: rd.Dataset = data,
            steps: int = steps_per_execution,
            settings: dict[str, Any] = settings,
        ) -> tuple[Any, Any, Any, Any]:
            model = built(strategy, loss=nn.MSELoss(reduction="none"), steps_per_execution=steps, **settings)
            history = model.fit(data, epochs=2, verbose=False).history
            rate = {"rate": model.optimizer.param_groups[0]["lr"]}
            return state(model), history, model.evaluate(data, verbose=False), rate

        check_same(three, trained, f"case {number}")


def test_a_scope_that_sums_gradients_changes_nothing(three: rd.Strategy) -> None:
    model, reference = built(three), built(rd.OneDeviceStrategy("cpu"))
    with three.scope(gradient_reduce_op="SUM"):
        model.fit(regression(5, BATCH), verbose=False)
    with three.scope(gradient_reduce_op="MEAN"):
        """Back to the default, for the other tests."""
    reference.fit(regression(5, BATCH), verbose=False)
    assert_same(state(model), state(reference))


def test_metrics_with_sums_lists_and_custom_states_are_the_same(three: rd.Strategy) -> None:
    x = np.random.default_rng(1).normal(size=(14, 1)).astype(np.float32)
    y = (np.arange(14) % 2).astype(np.float32)[:, None]
    data = rd.Dataset.from_tensor_slices((x, y)).batch(BATCH)

    class LogitAUROC(BinaryAUROC):
        def update(self, prediction: torch.Tensor, target: torch.Tensor) -> None:
            # BinaryAUROC itself decides batch by batch whether it is given logits.
            super().update(prediction.sigmoid(), target.long())

    def evaluated(strategy: rd.Strategy) -> dict[str, Any]:
        metrics = lambda: {"auroc": LogitAUROC(), "mse": MeanSquaredError(), "r": PearsonCorrCoef()}  # noqa: E731
        model = built(strategy, lambda: line(1.0).float(), metrics=metrics)
        return model.evaluate(data, verbose=False)

    found, expected = evaluated(three), evaluated(rd.OneDeviceStrategy("cpu"))
    assert found["auroc"] == expected["auroc"]
    assert found == {name: pytest.approx(value, rel=1e-5, nan_ok=True) for name, value in expected.items()}


def test_metrics_that_guess_from_values_are_the_same(three: rd.Strategy) -> None:
    def loss(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(prediction, target.float())

    def numbers(strategy: rd.Strategy, num_rows: int, steps_per_execution: int) -> dict[str, Any]:
        x = np.random.default_rng(1).normal(size=(num_rows, 1)).astype(np.float32)  # many pieces look like scores
        data = rd.Dataset.from_tensor_slices((x, (np.arange(num_rows) % 2)[:, None])).batch(BATCH)
        metrics = lambda: {"auroc": BinaryAUROC(), "accuracy": BinaryAccuracy(), "f1": BinaryF1Score()}  # noqa: E731
        net = lambda: line(1.0).float()  # noqa: E731
        model = built(strategy, net, metrics=metrics, loss=loss, steps_per_execution=steps_per_execution)
        return model.evaluate(data, verbose=False) | model.fit(data, verbose=False).history

    for case in ((9, 1), (14, 2)):
        found, expected = numbers(three, *case), numbers(rd.OneDeviceStrategy("cpu"), *case)
        assert {name: pytest.approx(value, rel=1e-5) for name, value in expected.items()} == found, case


def test_a_model_saved_by_one_strategy_goes_on_under_another(three: rd.Strategy, tmp_path: Path) -> None:
    def resumed(strategy: rd.Strategy) -> dict[str, Any]:
        with strategy.scope():
            net = small_net()
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
            model = rd.Model.load(tmp_path / "model", net, optimizer)
            model.compile(optimizer, nn.MSELoss())
        model.fit(regression(6, BATCH), verbose=False)
        return state(model)

    first = built(three)
    first.fit(regression(6, BATCH), verbose=False)
    first.save(tmp_path / "model")
    assert repr(rd.Model.load(tmp_path / "model").module) == repr(small_net())
    first.fit(regression(6, BATCH), verbose=False)
    assert_same(resumed(three), state(first))
    assert_same(resumed(rd.OneDeviceStrategy("cpu")), state(first))


def test_batch_logs_and_hooks_are_the_same(three: rd.Strategy) -> None:
    def recorded(strategy: rd.Strategy, steps_per_execution: int) -> Recorder:
        recorder = Recorder(read=("batch_end", "test_batch_end", "epoch_end"))
        model = built(strategy, steps_per_execution=steps_per_execution)
        held_out = regression(5, BATCH)
        model.fit(regression(13, BATCH), epochs=2, validation_data=held_out, callbacks=[recorder], verbose=False)
        return recorder

    for size in (1, 2):
        found, expected = recorded(three, size), recorded(rd.OneDeviceStrategy("cpu"), size)
        assert found.calls == expected.calls
        for logs, expected_logs in zip(found.logs, expected.logs, strict=True):
            assert_same(logs, expected_logs, size)
