"""Programs of public bug reports of other frameworks, and real digits: replicas train what one device trains."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import raydist as rd
from tests.real_data import real_file

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

ROWS, BATCH = 22, 5  # the last batch leaves one of three replicas without rows
Make = Callable[[], Any]
Train = Callable[..., Any]


@pytest.fixture
def strategy(mirrored: Callable[[int], rd.Strategy]) -> rd.Strategy:
    return mirrored(3)


def arrays() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 6, dtype=torch.float64, generator=generator)
    return x, torch.randn(ROWS, 1, dtype=torch.float64, generator=generator)


def batches(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(x.split(BATCH), y.split(BATCH), strict=True)


def net(seed: int = 0, outputs: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def net_and_sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def check(
    strategy: rd.Strategy, make: Make, train: Train, data: tuple[torch.Tensor, torch.Tensor] | None = None
) -> Any:
    """Run `train(made, x, y, number)` for each batch on one device and on replicas; all modules must be equal."""
    data = data or arrays()
    one = make()
    for number, (x, y) in enumerate(batches(*data)):
        train(one, x, y, number)
    with strategy.scope():
        made = make()

    def step(batch: Any, number: int) -> None:
        train(made, *batch, number)

    for number, batch in enumerate(strategy.distribute_dataset(rd.Dataset.from_tensor_slices(data).batch(BATCH))):
        strategy.run(step, args=(batch, number))
    assert_same(made, one)
    return made


def assert_same(made: Any, one: Any) -> None:
    for mine, theirs in zip(made, one, strict=True):
        if isinstance(theirs, nn.Module):
            for name, value in theirs.state_dict().items():
                torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-9, atol=1e-12, msg=name)


class TwoWays(nn.Module):
    """A layer for some rows or steps, another one for the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 1)
        self.double()

    def forward(self, x: torch.Tensor, number: int) -> Any:
        return self.head((self.a if number % 2 == 0 else self.b)(x).tanh())


def two_ways() -> tuple[TwoWays, torch.optim.Optimizer]:
    model = TwoWays()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3)


def test_layers_that_only_unsynchronised_micro_batches_use(strategy: rd.Strategy) -> None:
    """Gradients of a backward pass under `no_sync` were never exchanged if the last pass used other layers."""

    def train(made: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        model, optimizer = made
        context = rd.get_replica_context()
        with context.no_sync() if number % 2 == 0 else contextlib.nullcontext():
            (F.mse_loss(model(x, number), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()

    check(strategy, two_ways, train)


def test_requires_grad_is_toggled_in_the_step(strategy: rd.Strategy) -> None:
    """The two networks of a GAN, of which the step freezes one after the other."""

    def make() -> tuple[Any, ...]:
        generator, critic = net(1, 6), net(2)
        return generator, critic, *(torch.optim.SGD(part.parameters(), lr=0.1) for part in (generator, critic))

    def train(made: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        generator, critic, generator_sgd, critic_sgd = made
        critic.requires_grad_(False)
        generator_sgd.zero_grad()
        F.softplus(-critic(generator(x))).mean().backward()
        generator_sgd.step()
        critic.requires_grad_(True)
        generator.requires_grad_(False)
        critic_sgd.zero_grad()
        (F.softplus(-critic(x)) + F.softplus(critic(generator(x)))).mean().backward()
        critic_sgd.step()
        generator.requires_grad_(True)

    check(strategy, make, train)


def test_averaged_weights_of_spectrally_normalised_layers(strategy: rd.Strategy) -> None:
    """The vectors of the power iteration are buffers: those of each rank drifted, and their average with them."""

    def make() -> tuple[Any, ...]:
        torch.manual_seed(0)
        norm = nn.utils.parametrizations.spectral_norm
        model = nn.Sequential(norm(nn.Linear(6, 8)), nn.Tanh(), norm(nn.Linear(8, 1))).double()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        return model, average, torch.optim.Adam(model.parameters(), lr=0.05)

    def train(made: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        model, average, optimizer = made
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)

    check(strategy, make, train)


def test_negatives_of_all_replicas(strategy: rd.Strategy) -> None:
    """A contrastive loss whose ranks saw their own rows alone, or got no gradients through those of others."""

    def train(made: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        model, optimizer = made
        context = rd.get_replica_context()
        optimizer.zero_grad()
        num_rows = len(x) if context.num_rows is None else context.num_rows
        anchors, positives = (F.normalize(model(rows[:num_rows]), dim=1) for rows in (x, x.flip(1)))
        candidates = context.all_gather(positives, axis=0)
        counts = context.all_gather(torch.tensor([num_rows]), axis=0)
        labels = torch.arange(num_rows) + counts[: context.replica_id_in_sync_group].sum()
        (F.cross_entropy(anchors @ candidates.T * 3, labels) if num_rows else candidates.sum() * 0).backward()
        optimizer.step()

    def make() -> tuple[Any, ...]:
        model = net(outputs=4)
        return model, torch.optim.SGD(model.parameters(), lr=0.3)

    check(strategy, make, train)


def losses_on_digits(strategy: rd.Strategy, images: Any, labels: Any) -> list[float]:
    """The loss of every step, over all its rows."""
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(1352, 10)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)

    def train_step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0][:, None] / 255.0), batch[1].long())
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = rd.Dataset.from_tensor_slices((images, labels)).shuffle(len(images), seed=1)
    batches = strategy.distribute_dataset(data.batch(128).map(lambda x, y: (x.astype(np.float64), y)))
    results = [strategy.run(train_step, args=(batch,)) for batch in batches]
    return [strategy.reduce("MEAN", loss).item() for loss in results]


def test_every_step_on_digits_has_the_loss_of_one_replica(two: rd.MirroredStrategy) -> None:
    data = np.load(real_file("mnist10k.npz"))
    arrays = data["images"][:2000], data["labels"][:2000]
    losses, expected = (losses_on_digits(strategy, *arrays) for strategy in (two, rd.OneDeviceStrategy("cpu")))
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
