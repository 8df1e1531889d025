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

    def routed(self, x: torch.Tensor) -> Any:
        """Call each layer only if it has rows, as a mixture of experts does."""
        chosen, hidden = x[:, 0] > 0.8, x.new_zeros(len(x), 4)
        for layer, mask in ((self.a, chosen), (self.b, ~chosen)):
            if mask.any():
                hidden = hidden.index_put((mask.nonzero()[:, 0],), layer(x[mask]))
        return self.head(hidden.tanh())


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


def test_layers_that_one_replica_or_no_replica_uses(strategy: rd.Strategy) -> None:
    """A parameter without a gradient was given zeros, so that weight decay moved it; or the step hung."""

    def train(made: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        model, optimizer = made
        optimizer.zero_grad()
        F.mse_loss(model.routed(x) if number < 3 else model(x, 1), y).backward()
        optimizer.step()

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


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_penalties_of_gradients(strategy: rd.Strategy) -> None:
    """Derivatives of derivatives, for inputs or for parameters, were scaled by the number of ranks once more."""

    def train(made: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        model, optimizer = made
        optimizer.zero_grad()
        if number % 2:
            x = x.clone().requires_grad_(True)
            outputs = model(x)
            (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
            (F.mse_loss(outputs, y) + slope.square().sum(1).mean()).backward()
        else:
            F.mse_loss(model(x), y).backward(create_graph=True)
            sum(parameter.grad.square().sum() for parameter in model.parameters()).mul(0.1).backward()
        optimizer.step()

    check(strategy, net_and_sgd, train)


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


def test_a_decision_about_the_loss_of_all_rows(strategy: rd.Strategy) -> None:
    """Each rank left out the batches in which its own rows had a spike, and waited for the others."""
    x, y = arrays()
    y[12] = 300.0

    def train(made: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        model, optimizer = made
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if rd.get_replica_context().all_reduce(rd.ReduceOp.SUM, (loss > 100).double()) == 0:
            loss.backward()
            optimizer.step()

    check(strategy, net_and_sgd, train, (x, y))


BATCH_SIZE = 128
NUM_TRAIN = 4000


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(576, 10),
    ).double()


def to_inputs(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    return images[:, None] / 255.0, labels.astype(np.int64)


def losses_of_an_epoch(strategy: rd.Strategy, images: Any, labels: Any) -> list[float]:
    """The loss of every step, over all its rows."""
    torch.manual_seed(0)
    with strategy.scope():
        model = small_network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)

    def train_step(batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss * len(y), len(y)

    rows = rd.Dataset.from_tensor_slices((images[:NUM_TRAIN], labels[:NUM_TRAIN]))
    batches = strategy.distribute_dataset(rows.shuffle(NUM_TRAIN, seed=1).batch(BATCH_SIZE).map(to_inputs))
    results = [strategy.run(train_step, args=(batch,)) for batch in batches]
    sums = [(strategy.reduce("SUM", loss), strategy.reduce("SUM", count)) for loss, count in results]
    return [float(loss / count) for loss, count in sums]


def test_every_step_has_the_loss_of_one_replica(two: rd.MirroredStrategy) -> None:
    data = np.load(real_file("mnist10k.npz"))
    losses = losses_of_an_epoch(two, data["images"], data["labels"])
    expected = losses_of_an_epoch(rd.OneDeviceStrategy("cpu"), data["images"], data["labels"])
    assert len(losses) == -(-NUM_TRAIN // BATCH_SIZE)
    assert losses[-1] < losses[0] / 3
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
