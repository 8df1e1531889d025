"""Changes between steps, in any order, have the same effect with replicas as on one device (I1).

Models come and go, steps fail, and the driver changes what steps use: values, gradients, hooks, groups, learning rates.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import raydist as rd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

# In uneven batches of five, of which each replica has rows: where one stands in, a step that fails leaves its running
# statistics as they were.
_ROWS = torch.sin(torch.arange(40.0, dtype=torch.float64) * 1.7).reshape(10, 4)
_LABELS = torch.arange(10) % 3


class Base:
    """One program; `seen` is what it has read."""

    def __init__(self, strategy: rd.Strategy) -> None:
        self.strategy = strategy
        self.seen: list[Any] = []
        self.others: list[nn.Module] = []
        dataset = rd.Dataset.from_tensor_slices((_ROWS, _LABELS)).batch(5)
        self.batches = strategy.distribute_dataset(dataset)
        self.drawn = iter(self.batches)
        self._make()

    def _make(self) -> None:
        """A new model in the place of the one before."""
        with self.strategy.scope():
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(4, 5), rd.SyncBatchNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)

    def _batch(self) -> Any:
        with contextlib.suppress(StopIteration):
            return next(self.drawn)
        self.drawn = iter(self.batches)
        return next(self.drawn)

    @property
    def _first(self) -> nn.Linear:
        layer = self.model[0]
        assert isinstance(layer, nn.Linear)
        return layer

    def _run(self, *, clears: bool = True, steps: bool = True, fails: bool = False, reads: bool = True) -> None:
        model, optimizer = self.model, self.optimizer

        def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            if clears:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            if loss.requires_grad:
                loss.backward()
            if fails:
                raise ZeroDivisionError("on purpose")
            if steps:
                optimizer.step()
            return loss.detach()

        value = self.strategy.run(step, args=(self._batch(),))
        if reads or fails:
            self.seen.append(self.strategy.reduce(rd.ReduceOp.MEAN, value).item())


class Program(Base):
    """What a program may do: its methods."""

    def train(self) -> None:
        self._run()

    def train_without_a_look(self) -> None:
        self._run(reads=False)

    def accumulate(self) -> None:
        self._run(clears=False, steps=False)

    def fail(self) -> None:
        with contextlib.suppress(ZeroDivisionError):
            self._run(fails=True, clears=False)

    def fail_at_once(self) -> None:
        def step(batch: Any) -> Any:
            if batch is not None:
                raise ZeroDivisionError("on purpose")
            return batch

        with contextlib.suppress(ZeroDivisionError):
            self.strategy.local_results(self.strategy.run(step, args=(self._batch(),)))

    def step_alone(self) -> None:
        optimizer = self.optimizer
        self.strategy.run(lambda: optimizer.step())

    def evaluate(self) -> None:
        model = self.model
        with torch.inference_mode():
            value = self.strategy.run(lambda batch: model(batch[0]).sum(1), args=(self._batch(),))
            self.seen.append(self.strategy.gather(value).clone())

    # --- reads --------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        self.seen.append({name: value.clone() for name, value in self.model.state_dict().items()})

    def read_gradients(self) -> None:
        self.seen += [None if it.grad is None else it.grad.clone() for it in self.model.parameters()]

    def read_states(self) -> None:
        self.seen.append(copy.deepcopy(self.optimizer.state_dict()["state"]))

    # --- changes ------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        with torch.no_grad():
            self._first.weight.mul_(0.9)

    def write_unseen(self) -> None:
        self._first.weight.detach().numpy()[0, 0] = 0.25

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad()

    def zero_gradients(self) -> None:
        self.model.zero_grad(set_to_none=False)

    def give_gradient(self) -> None:
        self._first.weight.grad = torch.full_like(self._first.weight, 0.5)

    def freeze(self) -> None:
        self._first.weight.requires_grad_(not self._first.weight.requires_grad)

    def hook(self) -> None:
        if self._first.weight.requires_grad:
            self._first.weight.register_hook(lambda gradient: gradient * 0.5)

    def slow_down(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def schedule(self) -> None:
        with warnings.catch_warnings(action="ignore"):  # of torch: the optimizer has not stepped yet
            self.scheduler.step()
        self.seen.append(self.scheduler.get_last_lr())

    def load(self) -> None:
        self.model.load_state_dict({name: value * 0.5 for name, value in self.model.state_dict().items()})

    def load_states(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def change_mode(self) -> None:
        self.model.train(not self.model.training)

    def add_group(self) -> None:
        if len(self.optimizer.param_groups) == 1:
            with self.strategy.scope():
                self.model.extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.optimizer.add_param_group({"params": [self.model.extra], "lr": 0.05})

    def exchange_layer(self) -> None:
        group = self.optimizer.param_groups[0]["params"]
        for parameter in self._first.parameters():
            self.optimizer.state.pop(parameter, None)
        with self.strategy.scope():
            self.model[0] = copy.deepcopy(self._first)
        group[:2] = list(self._first.parameters())

    def copy_model(self) -> None:
        with self.strategy.scope():
            self.others.append(copy.deepcopy(self.model))

    def compare_models(self) -> None:
        models = [self.model, *self.others[-2:]]
        value = self.strategy.run(lambda batch: sum(it(batch[0]) for it in models).sum(1), args=(self._batch(),))
        self.seen.append(self.strategy.gather(value).clone())

    def replace_buffers(self) -> None:
        for buffer in self.model.buffers():
            buffer.data = buffer.data + 1

    def make_anew(self) -> None:
        self._make()
        gc.collect()


Deed = Callable[[Program], None]
DEEDS: list[Deed] = [deed for name, deed in vars(Program).items() if not name.startswith("_")]


def seen_by(strategy: rd.Strategy, deeds: list[Deed]) -> list[Any]:
    program = Program(strategy)
    for deed in (*deeds, Program.read, Program.read_gradients):
        deed(program)
    return program.seen


def check(strategy: rd.Strategy, num_examples: int) -> None:
    """Check that random programs see the same as on one device."""

    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(deeds=st.lists(st.sampled_from(DEEDS), min_size=4, max_size=14))
    @example(deeds=[Program.accumulate, Program.fail_at_once, Program.accumulate, Program.step_alone])
    @example(deeds=[Program.train, Program.fail, Program.read_gradients, Program.step_alone])
    @example(deeds=[Program.train, Program.freeze, Program.copy_model, Program.train, Program.compare_models])
    @example(deeds=[Program.train, Program.clear_gradients, Program.make_anew, Program.train])
    @example(deeds=[Program.evaluate, Program.train, Program.train, Program.fail])
    @example(
        deeds=[Program.train, Program.exchange_layer, Program.train, Program.fail, Program.slow_down, Program.train]
    )
    @example(deeds=[Program.train, Program.add_group, Program.train, Program.fail, Program.schedule, Program.train])
    def alike(deeds: list[Deed]) -> None:
        with rd.OneDeviceStrategy("cpu") as alone:
            expected = seen_by(alone, deeds)
        found = seen_by(strategy, deeds)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)

    alike()


def test_mirrored(mirrored: Callable[[int], rd.MirroredStrategy]) -> None:
    check(mirrored(2), 10)


def test_central_storage(central: Callable[[int], rd.CentralStorageStrategy]) -> None:
    check(central(2), 4)
