"""The sidecar evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raydist as rd
from raydist.training.sidecar_evaluator import Evaluated, SidecarWork
from tests.refused import check_refused
from tests.training.toys import compiled, regression, small_net


class FailsLater(rd.Callback):
    num_evaluations = 0

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        self.num_evaluations += 1
        if self.num_evaluations == 2:
            raise ZeroDivisionError("in the second evaluation")


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_a_training_is_evaluated_beside_it_and_an_error_is_told(ray_cluster: None, tmp_path: Path) -> None:
    data = regression(10, 4)
    model = make_model()
    settings: dict[str, Any] = {"callbacks": [FailsLater()], "resources": {"CPU": 0.01}}
    with rd.SidecarEvaluator(make_model, data, tmp_path, **settings).start() as evaluator:
        model.fit(data, epochs=1, verbose=False, checkpoint=tmp_path)
        found = evaluator.wait(1, timeout_s=60)
        assert [(each.step, each.logs) for each in found] == [(3, model.evaluate(data, verbose=False))]
        with pytest.raises(rd.FailedPreconditionError, match="must be started once"):
            evaluator.start()
        model.fit(data, epochs=2, verbose=False, checkpoint=tmp_path)
        with pytest.raises(ZeroDivisionError, match="in the second evaluation"):
            evaluator.wait(2, timeout_s=60)


def test_bad_settings(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model_fn": 1}, "model_fn must be a function"),
        ({"strategy": rd.OneDeviceStrategy("cpu")}, "strategy must be a function that makes one"),
        ({"steps": 0}, "steps must be >= 1 or None, got 0"),
    ]
    given: dict[str, Any] = {"model_fn": make_model, "data": regression(4, 4), "checkpoint_dir": "a"}
    check_refused(lambda settings: rd.SidecarEvaluator(**given | settings), cases)
    net: Any = small_net
    with pytest.raises(rd.InvalidArgumentError, match="model_fn must make a compiled rd.Model, got Sequential"):
        SidecarWork(net, regression(4, 4), str(tmp_path))(lambda: True, lambda _: None)
    with rd.CheckpointManager(rd.Checkpoint(net=small_net()), tmp_path, 1) as manager:
        manager.save()
    with pytest.raises(rd.InvalidArgumentError, match="'model' is missing"):  # and not a wrong result
        SidecarWork(make_model, regression(4, 4), str(tmp_path))(lambda: False, lambda _: None)


def make_model() -> rd.Model:
    return compiled(small_net())


def test_each_checkpoint_is_evaluated_at_most_once_the_newest_first(tmp_path: Path) -> None:
    model = make_model()
    data = regression(10, 4)
    expected: list[dict[str, Any]] = []
    steps: list[int] = []
    found: list[Evaluated] = []

    def stopped() -> bool:
        """Trains an epoch whenever there was nothing new; ends after three."""
        if len(expected) < 3:
            model.fit(data, epochs=len(expected) + 1, verbose=False, checkpoint=tmp_path)
            expected.append(model.evaluate(data, verbose=False))
            steps.append(int(rd.get_global_step()))
            return False
        return bool(found) and found[-1].logs == expected[-1]

    SidecarWork(make_model, data, str(tmp_path))(stopped, found.append)
    places = [expected.index(each.logs) for each in found]
    assert places == sorted(set(places))  # others may have come meanwhile, and were passed over
    assert places[-1] == 2
    assert found[-1].step == steps[-1]


def test_it_ends_after_so_many(tmp_path: Path) -> None:
    make_model().fit(regression(10, 4), verbose=False, checkpoint=tmp_path)
    found: list[Evaluated] = []
    SidecarWork(make_model, regression(10, 4), str(tmp_path), max_evaluations=1, steps=2)(lambda: False, found.append)
    assert len(found) == 1


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_checkpoint_may_go_while_it_is_read(is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model().fit(regression(10, 4), verbose=False, checkpoint=tmp_path)
    found: list[Evaluated] = []

    def remove(*args: Any, **more: Any) -> None:
        for name in ("model.safetensors", *([] if is_whole else ["manifest.json"])):
            (tmp_path / "ckpt-1" / name).unlink(missing_ok=True)
        raise rd.DataLossError("a file is missing")

    monkeypatch.setattr(rd.Checkpoint, "restore", remove)
    work = SidecarWork(make_model, regression(10, 4), str(tmp_path))
    if is_whole:
        with pytest.raises(rd.DataLossError, match="a file is missing"):
            work(lambda: False, found.append)
    else:
        work(lambda: not (tmp_path / "ckpt-1" / "manifest.json").exists(), found.append)
    assert found == []
