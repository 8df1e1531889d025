"""Updates, optimizers, schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

import raydist as rd
from raydist.training.updates import optimizer_by_name, require_optimizer, scheduler_of
from tests.refused import check_refused
from tests.shared_strategies import few_workers
from tests.training.toys import batches_of, column, compiled, line, regression, regression_arrays, small_net

NUM_ROWS = 22  # batches of 4: the last has 2 rows
Rows = list[tuple[torch.Tensor, torch.Tensor]]


def bare(net: nn.Module, groups: list[Rows], *, epochs: int = 1, clip_norm: float | None = None) -> list[float]:
    """One step a group, on the mean over all of its rows; returns the learning rate of each."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    rates = []
    for group in groups * epochs:
        x, y = (torch.cat(parts) for parts in zip(*group, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def groups_of(size: int) -> list[Rows]:
    batches = batches_of(regression_arrays(NUM_ROWS), 4)
    return [batches[start : start + size] for start in range(0, len(batches), size)]


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def test_equals_a_bare_loop_over_joined_batches() -> None:
    cases = [(1, None, 1), (1, 0.3, 4), (2, None, 4), (2, None, 1), (4, 0.3, 1), (4, 0.3, 4), (100, None, 1)]
    for accumulate_steps, clip_norm, steps_per_execution in cases:
        net, reference = small_net(), small_net()
        bare(reference, groups_of(accumulate_steps), epochs=2, clip_norm=clip_norm)
        model = compiled(
            net,
            optimizer=momentum(net),
            scheduler=lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
            clip_norm=clip_norm,
            accumulate_steps=accumulate_steps,
            steps_per_execution=steps_per_execution,
        )
        model.fit(regression(NUM_ROWS, 4), epochs=2, verbose=False)
        for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
            case = f"{accumulate_steps}, {clip_norm}, {steps_per_execution}"
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=0, msg=case)


def test_weighted_batches_are_joined_by_their_weights() -> None:
    # y_hat = w * 1, loss = sum(s * (w - y)^2) / sum(s), w = 0: the gradient is -2 * sum(s * y) / sum(s)
    net = line()
    model = compiled(
        net, optimizer=torch.optim.SGD(net.parameters(), lr=0.5), loss=nn.MSELoss(reduction="none"), accumulate_steps=2
    )
    weights = column([1.0, 3.0, 2.0])[:, 0]
    data = rd.Dataset.from_tensor_slices((column([1, 1, 1]), column([1, 2, 6]), weights)).batch(2)
    model.fit(data, verbose=False)
    assert net.weight.item() == pytest.approx((1 + 6 + 12) / 6)


def test_a_scheduler_of_ones_own_follows_the_steps() -> None:
    net = small_net()
    optimizer = momentum(net)
    model = compiled(net, optimizer=optimizer, scheduler=LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    model.fit(regression(12, 4), verbose=False)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)


def test_schedulers_that_cannot_follow_are_refused() -> None:
    optimizer, other = (momentum(line()) for _ in range(2))
    cases: list[tuple[Any, str]] = [
        (ReduceLROnPlateau(optimizer), "got ReduceLROnPlateau, which waits for a metric"),
        (StepLR(other, 1), "must be of the optimizer that is compiled with it, got one of another SGD"),
        (lambda it: 3, "must be a torch.optim.lr_scheduler.LRScheduler.*got 3"),
        ("cosine", "got 'cosine'"),
    ]
    check_refused(lambda given: scheduler_of(given, optimizer), cases)


def test_a_name_is_a_class_of_torchs_over_all_parameters() -> None:
    module = nn.Linear(2, 1)
    names = {"adam": "Adam", "AdamW": "AdamW", "rms_prop": "RMSprop", "SGD": "SGD", "nadam": "NAdam"}
    for name, kind in names.items():
        optimizer = optimizer_by_name(name, module)
        assert type(optimizer) is getattr(torch.optim, kind)
        assert optimizer.param_groups[0]["params"] == list(module.parameters())
    cases: list[tuple[Any, str]] = [
        (("adan", module), r"got 'adan'\. Did you mean 'Adam'\? There are: ASGD, "),
        (("adam", nn.Tanh()), "'adam' needs parameters to optimise, got a Tanh without any"),
    ]
    check_refused(lambda case: optimizer_by_name(*case), cases)
    assert type(optimizer_by_name("muon", nn.Linear(2, 3, bias=False))) is torch.optim.Muon
    assert type(optimizer_by_name("sparse_adam", nn.Embedding(3, 2, sparse=True))) is torch.optim.SparseAdam
    with pytest.raises(rd.InvalidArgumentError, match="got LBFGS"):
        require_optimizer(torch.optim.LBFGS(module.parameters()), module, nn.MSELoss())


def test_each_name_trains_an_ordinary_network_or_says_why_not() -> None:
    reasons = {
        "Muon": r"Muon takes matrices, .*, got 2 others of 4: 0.bias \(4,\), 1.bias \(1,\)\. Use \"adamw\" for all",
        "SparseAdam": "SparseAdam takes parameters with sparse gradients, .*, got 4 others of 4: 0.weight",
        "LBFGS": "got LBFGS, which asks for the loss several times",
    }
    for name in sorted(name for name, kind in vars(torch.optim).items() if isinstance(kind, type)):
        if name == "Optimizer":
            continue
        model = rd.Model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
        if name in reasons:
            check_refused(lambda it: it[0].compile(it[1], "mse"), [((model, name), reasons[name])])
            continue
        model.compile(name, "mse")
        model.fit(torch.randn(4, 3), torch.randn(4, 1), verbose=False)


ROWS, BATCH = 24, 4


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def arrays() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(ROWS, 3), torch.randn(ROWS, 1)
    y[5] = 1e5  # its gradient is not finite in float16 once it is scaled: on one replica only
    return x, y


def data() -> rd.Dataset:
    return rd.Dataset.from_tensor_slices(arrays()).batch(BATCH)


def bare_scaled(clip_norm: float | None, accumulate_steps: int, epochs: int) -> tuple[nn.Module, dict[str, Any]]:
    module, size = net(), BATCH * accumulate_steps
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9), torch.amp.GradScaler("cpu")
    x, y = arrays()
    for start in [*range(0, ROWS, size)] * epochs:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            prediction = module(x[start : start + size])
        scaler.scale(nn.functional.mse_loss(prediction.float(), y[start : start + size])).backward()
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
    return module, scaler.state_dict()


def built(strategy: rd.Strategy, **settings: Any) -> rd.Model:
    with strategy.scope():
        model = rd.Model(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model.compile(optimizer, nn.MSELoss(), precision="fp16", **settings)
    return model


@pytest.mark.timeout(180)
def test_steps_and_scales_are_those_of_a_bare_loop(strategy: rd.Strategy) -> None:
    for case in ((None, 1, 1), (0.5, 2, 1), (0.5, 1, 2), (None, 2, 2)):
        clip_norm, accumulate_steps, steps_per_execution = case
        model = built(
            strategy, clip_norm=clip_norm, accumulate_steps=accumulate_steps, steps_per_execution=steps_per_execution
        )
        model.fit(data(), epochs=3, verbose=False)
        expected, state = bare_scaled(clip_norm, accumulate_steps, 3)
        scaler = model.checkpoint_objects()["scaler"]
        assert scaler.state_dict() == state, case
        assert state["scale"] < 2.0**16  # steps were left out, and others taken
        assert state["_growth_tracker"] > 0
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, msg=f"{case}")


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_a_resumed_fit_goes_on_with_the_scale(two: rd.MirroredStrategy, tmp_path: Path) -> None:
    whole = built(two, accumulate_steps=2)
    whole.fit(data(), epochs=3, verbose=False)
    built(two, accumulate_steps=2).fit(data(), epochs=2, checkpoint=tmp_path, verbose=False)
    resumed = built(two, accumulate_steps=2)
    resumed.fit(data(), epochs=3, checkpoint=tmp_path, verbose=False)
    states = [model.checkpoint_objects()["scaler"].state_dict() for model in (whole, resumed)]
    assert states[0] == states[1]
    assert states[0]["scale"] < 2.0**16
    for mine, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_workers_apart_are_refused() -> None:
    with few_workers(2) as strategy:  # nothing is started
        with strategy.scope():
            model = rd.Model(nn.Flatten())
        with pytest.raises(rd.InvalidArgumentError, match='precision must be "bf16" or None where several workers'):
            model.compile("sgd", "mse", precision="fp16")


def test_several_optimizers_step_and_are_saved(tmp_path: Path) -> None:
    with rd.OneDeviceStrategy("cpu").scope():
        net: Any = small_net()
        first, second = torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.Adam(net[2].parameters(), lr=0.1)
        model = rd.Model(net)
        model.compile((first, second), "mse", accumulate_steps=2)
    model.fit(regression(16, 4), verbose=False)
    assert model.optimizer is first
    alone: Any = small_net()
    optimizers = torch.optim.SGD(alone[0].parameters(), lr=0.1), torch.optim.Adam(alone[2].parameters(), lr=0.1)
    for x, y in regression(16, 8):
        alone.zero_grad()
        torch.nn.functional.mse_loss(alone(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    rd.Checkpoint(model=model).save(tmp_path / "both")
    assert [path.name for path in (tmp_path / "both").glob("*optimizer*")] == ["model.optimizer.1.safetensors"]
    with pytest.raises(rd.InvalidArgumentError, match="holds the state of one optimizer, got 2"):
        model.save(tmp_path / "model.safetensors")
    model.save(tmp_path / "model.safetensors", optimizer=False)
