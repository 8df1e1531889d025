from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.training.sidecar_evaluator import Evaluated
from tests.training.toys import column, compiled, line, regression, small_net


def test_the_module_stays_the_users() -> None:
    net = line(2.0)
    model = rd.Model(net)
    assert model.module is net
    assert list(model.parameters()) == list(net.parameters())
    assert model(torch.ones(1, 1, dtype=torch.float64)).item() == 2.0


def test_the_strategy_is_that_of_the_scope() -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    with strategy.scope():
        model = rd.Model(line())
    assert model.strategy is strategy
    assert rd.Model(line()).strategy.num_replicas_in_sync == 1


def test_a_class_is_no_module() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"needs a torch.nn.Module instance, got .*Linear"):
        rd.Model(nn.Linear)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_compile_comes_first(call: str) -> None:
    with pytest.raises(rd.FailedPreconditionError, match=r"must be compiled first: model.compile\(optimizer, loss\)"):
        getattr(rd.Model(small_net()), call)(regression(4, 4), verbose=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": 0.1}, "optimizer must be a torch.optim.Optimizer, got 0.1"),
        ({"loss": 3}, r"loss must be callable as loss\(prediction, target\), got 3"),
        ({"optimizer": "sdg"}, "optimizer must be one of torch's classes .* got 'sdg'. Did you mean 'SGD'.*AdamW, "),
        ({"loss": "mean_squared_error"}, "loss must be one of torch's classes .* got 'mean_squared_error'.*MSELoss, "),
        ({"steps_per_execution": 0}, "steps_per_execution must be >= 1, got 0"),
        ({"metrics": ["accuracy"]}, "metrics must be torchmetrics.Metric objects"),
    ],
)
def test_compile_checks_its_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        compiled(line(), **settings)


def test_an_optimizer_over_foreign_parameters_is_refused() -> None:
    net, other = line(), nn.Linear(5, 2)
    optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(
        rd.InvalidArgumentError, match=r"2 of its 3 are not among them, the first has the shape \(2, 5\)"
    ):
        compiled(net, optimizer=optimizer)


def test_compiling_again_replaces_everything() -> None:
    net = line()
    model = compiled(net)
    model.compile(torch.optim.SGD(net.parameters(), lr=0.0), nn.L1Loss())
    data = rd.Dataset.from_tensor_slices((column([1, 1]), column([1, 1]))).batch(2)
    history = model.fit(data, verbose=False)
    assert history.history["loss"] == [1.0]
    assert net.weight.item() == 0.0


def test_names_stand_for_torchs_classes() -> None:
    net, reference = small_net(), small_net()
    history = compiled(net, optimizer="adamw", loss="mse").fit(regression(9, 4), epochs=2, verbose=False)
    own = compiled(reference, optimizer=torch.optim.AdamW(reference.parameters()))
    assert history.history == own.fit(regression(9, 4), epochs=2, verbose=False).history
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), reference.parameters(), strict=True))


def test_the_optimizer_can_be_reached() -> None:
    model = compiled(small_net(), optimizer="sgd")
    model.optimizer.param_groups[0]["lr"] = 0.0
    before = [value.clone() for value in model.parameters()]
    model.fit(regression(4, 4), verbose=False)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(rd.FailedPreconditionError, match="must be compiled first"):
        _ = rd.Model(small_net()).optimizer


@pytest.mark.parametrize(
    "use",
    [
        rd.summary.create_file_writer,
        rd.TensorBoard,
        rd.CSVLogger,
    ],
    ids=["create_file_writer", "TensorBoard", "CSVLogger"],
)
def test_what_is_written_here_alone_is_not_at_a_uri(
    use: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rd.InvalidArgumentError, match="must be on a disk of this machine") as found:
        use("s3://key:hidden@bucket/file?sig=hidden")
    assert "hidden" not in str(found.value)
    assert not list(tmp_path.iterdir())  # of a directory "s3:"


def test_credentials_are_shown_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    uri = "memory://key:hidden@bucket/file?sig=hidden"
    model = compiled(small_net())
    model.fit(regression(4, 4), callbacks=[rd.ModelCheckpoint(uri, verbose=1)], verbose=False)
    with pytest.raises(rd.InvalidArgumentError, match="filepath may name epoch") as found:
        model.fit(regression(4, 4), callbacks=[rd.ModelCheckpoint(f"{uri}{{typo}}")], verbose=False)
    told = (capsys.readouterr().out, str(found.value), repr(Evaluated(uri, 3, {"loss": 0.5})))
    assert all("memory://***@bucket/file?***" in each and "hidden" not in each for each in told)
