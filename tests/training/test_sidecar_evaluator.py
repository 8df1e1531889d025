from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raydist as rd
from tests.training.test_sidecar import make_model
from tests.training.toys import regression


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_a_training_is_evaluated_beside_it(ray_cluster: None, tmp_path: Path) -> None:
    data = regression(10, 4)
    model = make_model()
    with rd.SidecarEvaluator(make_model, data, tmp_path, resources={"CPU": 0.01}).start() as evaluator:
        model.fit(data, epochs=1, verbose=False, checkpoint=tmp_path)
        found = evaluator.wait(1, timeout_s=60)
        with pytest.raises(rd.FailedPreconditionError, match="must be started once"):
            evaluator.start()
    assert [(each.step, each.logs) for each in found] == [(3, model.evaluate(data, verbose=False))]


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_an_error_is_told(ray_cluster: None, tmp_path: Path) -> None:
    def make_nothing() -> Any:
        raise ZeroDivisionError("no model")

    sidecar = rd.SidecarEvaluator(make_nothing, regression(4, 4), tmp_path, resources={"CPU": 0.01})
    with sidecar.start() as evaluator, pytest.raises(ZeroDivisionError, match="no model"):
        evaluator.wait(1, timeout_s=60)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_fn": 1}, "model_fn must be a function"),
        ({"strategy": rd.OneDeviceStrategy("cpu")}, "strategy must be a function that makes one"),
        ({"steps": 0}, "steps must be >= 1 or None, got 0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"model_fn": make_model, "data": regression(4, 4), "checkpoint_dir": "a"}
    with pytest.raises(rd.InvalidArgumentError, match=message):
        rd.SidecarEvaluator(**given | settings)
