"""Mixed precision, dropout and compiled steps, under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import raydist as rd
from tests.strategies.test_same_as_one_device import FEW_MAKERS, MAKERS

CHECKED = rd.RunOptions(param_sync_every=1)


@pytest.fixture(scope="module", params=[MAKERS[name] for name in FEW_MAKERS], ids=FEW_MAKERS)
def strategy(request: pytest.FixtureRequest) -> rd.Strategy:
    """A fixture of the module, so that Ray is up before a test begins."""
    made: rd.Strategy = request.param(request)
    return made


def batches_of(
    strategy: rd.Strategy, *, dtype: torch.dtype = torch.float32, count: int = 18, batch_size: int = 5
) -> Any:
    rows = torch.randn(count, 6, dtype=dtype, generator=torch.Generator().manual_seed(4))
    return strategy.distribute_dataset(rd.Dataset.from_tensor_slices(rows).batch(batch_size))


# --- mixed precision --------------------------------------------------------------------------------------------------


class Network(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.dropout(self.body(x).tanh()))


def test_autocast(strategy: rd.Strategy) -> None:
    """Parameters and gradients stay float32, replicas the same bits, and training stays near that in float32."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Network()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, enabled: bool) -> Callable[[torch.Tensor], Any]:
        def step(x: torch.Tensor) -> tuple[str, str]:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                out = model(x)
                loss = functional.mse_loss(out.float(), x.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            return str(out.dtype), str(next(model.parameters()).grad.dtype)  # type: ignore[union-attr]  # there is one

        return step

    with strategy.scope():
        model, optimizer = build()
    step = step_of(model, optimizer, True)
    for batch in batches_of(strategy):
        result = strategy.run(step, args=(batch,), options=CHECKED)
    assert set(strategy.local_results(result)) == {("torch.bfloat16", "torch.float32")}
    plain, plain_optimizer = build()
    plain_step = step_of(plain, plain_optimizer, False)
    for batch in batches_of(rd.OneDeviceStrategy("cpu")):
        plain_step(batch)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0.05, atol=0.02)
        assert not torch.equal(model.state_dict()[name], value)


def test_a_scaler_skips_the_same_steps_everywhere_and_the_driver_has_its_state(strategy: rd.Strategy) -> None:
    with strategy.scope():
        torch.manual_seed(0)
        model = Network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=3)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * 1e3).backward()  # infinite at first, in float32
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return norm

    scales = [scaler.get_scale()]
    for _ in range(3):
        for batch in batches_of(strategy):
            strategy.run(step, args=(batch,), options=CHECKED)
            scales.append(scaler.get_scale())
    skipped = sum(later < before for before, later in zip(scales, scales[1:], strict=False))
    assert skipped >= 2
    assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {12 - skipped}
    assert scaler.state_dict()["scale"] == scales[-1]
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "_growth_tracker": 0})
    strategy.run(step, args=(next(iter(batches_of(strategy))),), options=CHECKED)
    assert scaler.get_scale() == 8.0


# --- dropout ----------------------------------------------------------------------------------------------------------


def masks(strategy: rd.Strategy, *, loop: bool, draw: Callable[[], torch.Tensor]) -> list[list[float]]:
    """Return the numbers that each replica drew in three steps."""

    def step(x: torch.Tensor) -> torch.Tensor:
        drawn = draw()
        return drawn

    def whole(iterator: Any) -> torch.Tensor:
        drawn = torch.cat([draw() for _ in iterator])
        return drawn

    batches = batches_of(strategy, count=24, batch_size=8)  # rows for every replica
    if loop:
        found = list(strategy.local_results(strategy.run(whole, args=(iter(batches),))))
    else:
        each = [strategy.local_results(strategy.run(step, args=(batch,))) for batch in batches]
        found = [torch.cat(parts) for parts in zip(*each, strict=True)]
    return [part.tolist() for part in found]


def test_what_replicas_draw_differs_by_replica_and_step_and_repeats_by_seed(strategy: rd.Strategy) -> None:
    """Masks of dropout, and of a generator of the scope.

    Another seed in between: that a generator was given the seed it has is nowhere to be seen on the driver.
    """
    with strategy.scope():
        dropout = nn.Dropout(0.5)
        generator = torch.Generator()

    def mask() -> torch.Tensor:
        drawn: torch.Tensor = dropout(torch.ones(32))
        return drawn

    def numbers() -> torch.Tensor:
        return torch.rand(32, generator=generator)

    for draw, seed_by in ((mask, torch.manual_seed), (numbers, generator.manual_seed)):
        for loop, seeds in ((False, (11, 12, 11)), (True, (13, 12, 13))):
            runs = []
            for seed in seeds if draw is numbers else (seeds[0], *seeds):  # the same twice is the same again
                seed_by(seed)
                runs.append(masks(strategy, loop=loop, draw=draw))
            assert runs[0] == runs[-1] != runs[-2]
            assert draw is numbers or runs[0] == runs[1]
            of_steps = {tuple(part[start : start + 32]) for part in runs[0] for start in range(0, 96, 32)}
            assert draw is numbers or len(of_steps) == 3 * strategy.num_replicas_in_sync


# --- compiled steps ---------------------------------------------------------------------------------------------------


# Tracing an optimizer makes torch import a module of its own that it calls deprecated, and look at `.grad` of a loss.
TRACED = (
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
)


def traced(test: Callable[..., None]) -> Callable[..., None]:
    for mark in TRACED:
        test = mark(test)
    return test


def compiled_network(what: str, backend: str) -> Any:
    torch.manual_seed(0)
    model: Any = Network().double()
    if what == "method":
        model.compile(backend=backend)
    return torch.compile(model, backend=backend) if what == "module" else model


def training_step(model: Any, optimizer: torch.optim.Optimizer, what: str, backend: str) -> Any:
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
        return loss

    chosen: Any = torch.compile(loss_of, backend=backend) if what == "loss" else loss_of

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = chosen(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return torch.compile(step, backend=backend) if what == "step" else step


def check_compiled(strategy: rd.Strategy, what: str, backend: str) -> None:
    """What is compiled trains as plain code does."""
    with strategy.scope():
        model = compiled_network(what, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = training_step(model, optimizer, what, backend)
    for batch in batches_of(strategy, dtype=torch.float64):
        strategy.run(step, args=(batch,), options=CHECKED)
    plain = compiled_network("nothing", "")
    plain_step = training_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), "nothing", "")
    for batch in batches_of(rd.OneDeviceStrategy("cpu"), dtype=torch.float64):
        plain_step(batch)
    found = list(model.state_dict().values())
    torch.testing.assert_close(found, list(plain.state_dict().values()), rtol=1e-9, atol=1e-12)


# Each replica loads the compiler for seconds, and those of CentralStorageStrategy compile what the others do.
COMPILING = [MAKERS["OneDevice"], MAKERS["Mirrored-2"]]
COMPILING += [pytest.param(*MAKERS["CentralStorage-2"].values, marks=(pytest.mark.ray, pytest.mark.long))]


@traced
@pytest.mark.parametrize("strategy", COMPILING, ids=FEW_MAKERS, indirect=True)
def test_compiled_code_trains_as_plain_code_does(strategy: rd.Strategy) -> None:
    for what, backend in (("module", "eager"), ("method", "eager"), ("loss", "eager"), ("step", "aot_eager")):
        check_compiled(strategy, what, backend)
