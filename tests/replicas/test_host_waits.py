"""On a GPU the host must not wait for the device between the start of a step and its end, on a group that shows it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from raydist.collectives.base import Membership, Work
from raydist.collectives.checked import CallLog
from raydist.collectives.delegating import DelegatingCommunicator
from raydist.collectives.reducer.nonfinite import NonfinitePolicy
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.collectives.reducer.trailer import Updates
from raydist.core.errors import CollectiveMismatchError
from raydist.core.values import ReduceOp
from raydist.replicas.sync_peers import SyncPeers
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_ranks

# --- a group that behaves as one of gpus does: the host runs ahead, and every wait of the host is noted  --------------

_BLOCKING = {
    getattr(torch.Tensor, name): name
    for name in (
        *("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"),
        *("__contains__", "unique", "is_nonzero", "equal"),
    )
} | {torch.nonzero: "nonzero", torch.equal: "equal", torch.unique: "unique"}
_ON_THE_HOST = ("received", "flags", "check")
"""Functions of `trailer.py` that read numbers which have been copied to the host."""


@final
class DeviceGroup(DelegatingCommunicator):
    """A rank of a group of threads, as a GPU's."""

    def __init__(self, group: LocalGroup) -> None:
        super().__init__(group)
        self.host_runs_ahead = True
        self.waits: list[str] = []
        self.exchanges: list[str] = []
        self.num_started = 0

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        copied, started = tensor.detach().clone(), self.num_started

        def read() -> torch.Tensor:
            if self.num_started == started:  # nothing has followed it: the device is still at it
                self.waits.append("a copy to the host of the pass at hand")
            return copied

        return read

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        self.exchanges.append(what)
        with torch._C.DisableTorchFunction():  # the store of a GPU's group exchanges bytes
            return self._inner.exchange_on_host(data, what)

    def _begun(self, work: Work) -> Work:
        self.num_started += 1
        return _DeviceWork(self, work)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        return self._begun(self._inner.all_reduce(tensor, op))

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return self._begun(self._inner.all_gather(outputs, tensor))

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return self._begun(self._inner.all_gather_rows(outputs, tensor))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._begun(self._inner.broadcast(tensor, root))

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        return [torch.empty(numel, dtype=dtype) for numel, dtype in sizes]

    def barrier(self) -> None:
        self.waits.append("barrier")
        self._inner.barrier()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Note what the code of raydist that this thread runs inside the block reads of tensors."""
        with _Reads(self.waits):
            yield


@final
class _DeviceWork(Work):
    def __init__(self, group: DeviceGroup, work: Work) -> None:
        self._group, self._work = group, work

    def wait(self, timeout_s: float | None = None) -> None:
        if timeout_s is not None:
            self._group.waits.append("a wait with a limit")
        with torch._C.DisableTorchFunction():
            self._work.wait()

    def is_completed(self) -> bool:
        self._group.waits.append("is_completed")
        return True


@final
class _Reads(TorchFunctionMode):
    """Notes where raydist's code reads a tensor on the host; torch's own waits are torch's."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BLOCKING:
            frame = sys._getframe(1)
            name = frame.f_globals.get("__name__", "")
            if name.startswith("raydist.") and frame.f_code.co_name not in _ON_THE_HOST:
                self._waits.append(f"{_BLOCKING[func]} in {name}.{frame.f_code.co_name}")
        return func(*args, **(kwargs or {}))


# --- on a gpu the host must not wait for the device between the start of a step and its end, on a group that  ---------

CPU = torch.device("cpu")
NUM_STEPS = 5
MODELS = [
    nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double(),
    nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double(),
]
Step = Callable[["Replica"], None]


class Mirror:
    """The variables of a replica: some modules."""

    aggregates_buffers = False
    num_gradients_set = 0

    def __init__(self, modules: list[nn.Module]) -> None:
        self._parameters = tuple(parameter for module in modules for parameter in module.parameters())

    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self._parameters

    def objects(self) -> list[Any]:
        return []

    def written_buffers(self) -> list[Any]:
        return []


class Replica:
    """A replica on a device, with two models and their optimizers."""

    def __init__(self, group: LocalGroup, *, bucket_bytes: int) -> None:
        self.group = DeviceGroup(group)
        self.values = DeviceGroup(LocalGroup(group.hub, _beside(group), 20.0).start())
        self.rank = group.rank
        self.first, self.second = copy.deepcopy(MODELS)
        self.optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (self.first, self.second)]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        self.num_updates = 0
        self.calls = CallLog()
        self.reducer = GradientReducer(
            self.group,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=bucket_bytes,
            updates=lambda: Updates(self.num_updates, (0.1,)),
            calls=lambda: self.calls.digest,
        )
        mirror: Any = Mirror([self.first, self.second])
        policy = NonfinitePolicy(lambda _: [])
        self.peers = SyncPeers(self.values, self.reducer, CPU, mirror, policy, calls=self.calls)
        self.number = 0

    def batch(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.number)
        return torch.randn(4, 4, generator=generator, dtype=torch.float64)[2 * self.rank :][:2]

    def loss(self) -> torch.Tensor:
        predicted: torch.Tensor = self.second(self.first(self.batch()))
        return predicted.square().mean()

    def update(self) -> None:
        for optimizer in self.optimizers:
            self.peers.step_optimizer(optimizer, optimizer.step)
            self.num_updates += 1
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            optimizer.zero_grad()
            self.peers.note_cleared(parameters)

    def run(self, step: Step) -> None:
        with self.peers.run((2, 2), ReduceOp.MEAN, padding=True), self.group.in_step():
            step(self)
        self.number += 1

    @property
    def waits(self) -> list[str]:
        return self.group.waits + self.values.waits


def _beside(group: LocalGroup) -> Membership:
    return replace(group.membership, group="values")


def plain(replica: Replica) -> None:
    replica.loss().backward()
    replica.update()


def with_clipping(replica: Replica) -> None:
    replica.loss().backward()
    for model in (replica.first, replica.second):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    replica.update()


def with_accumulation(replica: Replica) -> None:
    with replica.peers.no_sync():
        replica.loss().backward()
    replica.loss().backward()
    replica.update()


def with_two_passes(replica: Replica) -> None:
    replica.loss().backward()
    replica.loss().backward()
    replica.update()


def with_scaling(replica: Replica) -> None:
    replica.scaler.scale(replica.loss()).backward()
    for optimizer in replica.optimizers:
        replica.scaler.unscale_(optimizer)
        replica.scaler.step(optimizer)  # torch waits here
    replica.scaler.update()
    for model in (replica.first, replica.second):
        model.zero_grad()
        replica.peers.note_cleared(model.parameters())


def with_collectives(replica: Replica) -> None:
    loss = replica.loss()
    total = replica.peers.all_reduce(ReduceOp.SUM, loss)
    replica.peers.all_reduce(ReduceOp.MEAN, loss.detach())
    replica.peers.all_reduce(ReduceOp.MAX, 3.0)
    (total / 2).backward()
    replica.update()


def with_one_model_after_the_other(replica: Replica) -> None:
    loss = replica.second(replica.first(replica.batch()).detach()).square().mean()
    (loss + replica.first(replica.batch()).square().mean()).backward()
    replica.update()


STEPS = (
    plain,
    with_clipping,
    with_accumulation,
    with_two_passes,
    with_scaling,
    with_collectives,
    with_one_model_after_the_other,
)


def trained(step: Step, bucket_bytes: int) -> list[Replica]:
    def main(group: LocalGroup) -> Replica:
        replica = Replica(group, bucket_bytes=bucket_bytes)
        replica.run(step)  # the first step agrees on layouts and sequences of calls
        replica.group.waits.clear()
        replica.values.waits.clear()
        del replica.group.exchanges[:], replica.values.exchanges[:]
        for _ in range(NUM_STEPS):
            replica.run(step)
        return replica

    return run_ranks(2, main)


def test_the_host_never_waits_and_replicas_train_as_one() -> None:
    """Both replicas hold the same; `with_collectives` sums losses that others weigh."""
    for step, bucket_bytes in [*((step, 64) for step in STEPS), (plain, 1 << 20), (with_two_passes, 1 << 20)]:
        case = f"{step.__name__} with buckets of {bucket_bytes}"
        first, second = trained(step, bucket_bytes)
        for replica in (first, second):
            assert replica.waits == [], case
            assert replica.group.exchanges == replica.values.exchanges == [], case
        for mine, theirs in zip(first.peers._attached or (), second.peers._attached or (), strict=True):
            assert torch.equal(mine, theirs), case
        if step is plain:
            torch.testing.assert_close(first.first.state_dict(), trained_alone(), rtol=1e-12, atol=1e-12)


def trained_alone() -> dict[str, Any]:
    """Return the first model after the steps of `plain`."""
    models = copy.deepcopy(MODELS)
    optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], 0.1)
    for number in range(NUM_STEPS + 1):
        rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        optimizer.zero_grad()
        models[1](models[0](rows)).square().mean().backward()
        optimizer.step()
    return models[0].state_dict()


def test_a_replica_that_lacks_a_gradient_waits_once() -> None:
    def step(replica: Replica) -> None:
        lacks = replica.rank == 1
        hidden = replica.first(replica.batch())
        (hidden.square().mean() if lacks else replica.second(hidden).square().mean()).backward()
        replica.update()

    complete, lacking = trained(step, 64)
    assert complete.waits == []
    assert lacking.waits == ["a copy to the host of the pass at hand"] * NUM_STEPS
    for mine, theirs in zip(complete.second.parameters(), lacking.second.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def failing(step: Step, num_steps: int = 5) -> list[str]:
    """The message that each rank gets, and in which step."""

    def main(group: LocalGroup) -> str:
        replica = Replica(group, bucket_bytes=64)
        for number in range(num_steps):
            try:
                replica.run(step)
            except CollectiveMismatchError as error:
                return f"{number}: {error}"
        return "no error"

    return run_ranks(2, main)


def test_what_replicas_do_differently_is_an_error_some_passes_later() -> None:
    def updates(replica: Replica) -> None:
        replica.loss().backward()
        if replica.number != 0 or replica.rank == 0:
            replica.update()

    def gradients(replica: Replica) -> None:
        replica.loss().backward()
        if replica.number == 0:
            torch.nn.utils.clip_grad_norm_(replica.first.parameters(), 1e-6 * (1 + replica.rank))
        replica.update()

    def known_sequences_of_calls(replica: Replica) -> None:
        """Ranks compare a call when it first follows another; afterwards the digests of all calls tell."""
        if replica.number == 1 and replica.rank == 1:
            replica.calls.digest += 1  # as another known sequence, which the group of threads would not let through
        replica.loss().backward()
        replica.update()

    for step, message in (
        (updates, "All ranks must agree on the updates made before step 1"),
        (gradients, "All replicas must change a gradient alike"),
        (known_sequences_of_calls, "All replicas must call the same collectives in the same order"),
    ):
        first, second = failing(step)
        assert first == second
        assert first.startswith("2: ")
        assert message in first


def test_a_call_is_compared_when_it_first_follows_another() -> None:
    def main(group: LocalGroup) -> list[list[str]]:
        replica = Replica(group, bucket_bytes=64)
        compared = []
        for ops in ("SUM", "SUM MAX", "SUM MAX", "SUM SUM", "SUM", "MAX"):
            before = len(replica.values.exchanges)
            with replica.peers.run((2, 2), ReduceOp.MEAN, padding=True):
                for op in ops.split():
                    replica.peers.all_reduce(ReduceOp(op), torch.ones(2))
            compared.append([what.split()[0] for what in replica.values.exchanges[before:]])
        return compared

    expected = [["all_reduce(SUM)"], ["all_reduce(MAX)"], [], ["all_reduce(SUM)"], [], ["all_reduce(MAX)"]]
    assert run_ranks(2, main) == [expected] * 2
