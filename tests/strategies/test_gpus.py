"""Training on all GPUs of a machine equals training on one, and the host never waits in a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from benchmarks.gpu import waits_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
NUM_STEPS = 10


@pytest.fixture
def on_gpus() -> Iterator[rd.Strategy]:
    with rd.MirroredStrategy([f"GPU:{number}" for number in range(torch.cuda.device_count())]) as strategy:
        yield strategy


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "cnn":
        layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))
        return nn.Sequential(*layers).double()
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 300), nn.Tanh(), nn.Linear(300, 5)).double()


def batches() -> rd.Dataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(NUM_STEPS * 24, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 5, (NUM_STEPS * 24,), generator=generator)
    return rd.Dataset.from_tensor_slices((images, labels)).batch(23)  # no number of GPUs divides it


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_all_gpus_train_as_one_device(on_gpus: rd.Strategy, kind: str, name: str) -> None:
    def trained(strategy: rd.Strategy) -> dict[str, torch.Tensor]:
        with strategy.scope():
            model = model_of(kind)
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05)
        step = step_of(model, optimizer)
        for batch in strategy.distribute_dataset(batches()):
            strategy.run(step, args=(batch,))
        return {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}

    expected = trained(rd.OneDeviceStrategy("cpu"))
    torch.testing.assert_close(trained(on_gpus), expected, rtol=1e-9, atol=1e-11)


def test_the_host_never_waits_in_a_step(on_gpus: rd.Strategy) -> None:
    with on_gpus.scope():
        model = model_of("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = step_of(model, optimizer)
    data = iter(on_gpus.distribute_dataset(batches().repeat()))
    for _ in range(3):
        on_gpus.run(step, args=(next(data),))
    waits = on_gpus.run(lambda batch: ", ".join(waits_of(lambda: step(batch))), args=(next(data),))
    assert on_gpus.local_results(waits) == ("",) * on_gpus.num_replicas_in_sync
