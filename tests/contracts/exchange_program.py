"""Programs that use the gradient exchange in all ways that there are, and the bare PyTorch loop over the same batches.

`raydist/testing/training_program.py` varies models and data; here what happens between loss and optimizer varies.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import raydist as rd
from raydist.collectives.base import Communicator
from raydist.collectives.reducer.nonfinite import NonfinitePolicy
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.collectives.reducer.trailer import Updates
from raydist.context.current import enter_replica
from raydist.context.replica_context import ReplicaContext
from raydist.mirroring.object_kinds import names_of, row_tables
from raydist.mirroring.replica import MirrorReplica
from raydist.replicas.function_calls import ReplicaView, watch_gradient_readers
from raydist.replicas.sync_peers import SyncPeers
from tests.collectives.models import FEATURES, Lookup, Shared, dense, pieces
from tests.collectives.threads import run_ranks

__all__ = [
    "ALL_AT_ONCE",
    "ExchangeProgram",
    "assert_same",
    "check_exchanges",
    "exchange_programs",
    "train_bare",
    "train_on_ranks",
    "train_under",
]

OnRanks = Callable[..., list[Any]]
MODELS: dict[str, Callable[[], nn.Module]] = {"dense": dense, "shared": Shared, "lookup": Lookup}


@dataclass
class Parts:
    """What a program trains with."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler


@dataclass(frozen=True)
class ExchangeProgram:
    """One training run.

    Attributes:
        model: Name of one of `MODELS`.
        optimizer: "sgd" (momentum and weight decay) or "adam"; sparse gradients get one of their own.
        num_rows: Rows of the data.
        batch_size: Of a global batch.
        accumulate: Global batches for each update.
        passes: Backward passes for each batch, all but the last one under `no_sync()`.
        clip: Gradients are clipped before they are used.
        adds_up: The loss has a global denominator, and gradients are added up.
        scaled: A GradScaler scales the loss and looks for infinities.
        bad: Rows that make their loss NaN.
        skips: Batches with such rows are skipped (`on_nonfinite`).
        by_hand: Gradients of `torch.autograd.grad` are put into `.grad`: "all", "some" (backward brings the others), or
            "in place" (all, added to the tensors that are there).
        seed: Of data and parameters.
    """

    model: str
    optimizer: str
    num_rows: int
    batch_size: int
    accumulate: int = 1
    passes: int = 1
    clip: bool = False
    adds_up: bool = False
    scaled: bool = False
    bad: tuple[int, ...] = ()
    skips: bool = False
    by_hand: Literal["none", "all", "some", "in place"] = "none"
    seed: int = 0

    @property
    def num_steps(self) -> int:
        return -(-self.num_rows // self.batch_size)

    @property
    def options(self) -> rd.RunOptions:
        return rd.RunOptions(
            gradient_reduce_op=rd.ReduceOp.SUM if self.adds_up else rd.ReduceOp.MEAN,
            on_nonfinite="skip" if self.skips else "pass",
            param_sync_every=1,
        )

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.num_rows, FEATURES, dtype=torch.float64, generator=generator)
        y = torch.randn(self.num_rows, 1, dtype=torch.float64, generator=generator)
        y[[row for row in self.bad if row < self.num_rows]] = torch.nan
        return x, y

    def build(self) -> Parts:
        torch.manual_seed(self.seed)
        model = MODELS[self.model]().double()
        sparse = [m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
        others = [p for p in model.parameters() if not any(p is weight for weight in sparse)]
        optimizers: list[torch.optim.Optimizer] = []
        if self.optimizer == "sgd":
            optimizers.append(torch.optim.SGD(others, lr=0.1, momentum=0.9, weight_decay=0.01))
        else:
            optimizers.append(torch.optim.Adam(others, lr=0.05))
        if sparse:
            made = torch.optim.SparseAdam(sparse, lr=0.05) if self.optimizer == "adam" else torch.optim.SGD(sparse, 0.1)
            optimizers.append(made)
        return Parts(model, optimizers, torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=self.scaled))

    def differentiate(self, loss: torch.Tensor, model: nn.Module) -> None:
        """Add the derivative of a loss to `.grad`."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        by_hand = {"none": [], "some": trained[::2]}.get(self.by_hand, trained)
        others = [parameter for parameter in trained if not any(parameter is one for one in by_hand)]
        if by_hand:
            found = torch.autograd.grad(loss, by_hand, retain_graph=bool(others), allow_unused=True)
            for parameter, gradient in zip(by_hand, found, strict=True):
                if gradient is not None and parameter.grad is None:
                    # A GradScaler of torch cannot write expanded ones.
                    parameter.grad = gradient * 1.0
                elif gradient is not None and parameter.grad is not None:
                    summed = parameter.grad + gradient
                    in_place = self.by_hand == "in place" and not gradient.is_sparse
                    parameter.grad = parameter.grad.add_(gradient) if in_place else summed
        if others:
            loss.backward(inputs=others)

    def update(self, optimizers: list[torch.optim.Optimizer], scaler: torch.amp.GradScaler) -> None:
        """The second half of a step."""
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if self.clip:  # torch has no norm of sparse ones
            nn.utils.clip_grad_norm_([p for group in optimizers[0].param_groups for p in group["params"]], 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    def make_step(self, parts: Parts) -> Callable[..., torch.Tensor]:
        """A step function; `together` has the collectives, None for a context to be asked for."""
        program = self
        model, optimizers, scaler = parts.model, parts.optimizers, parts.scaler

        def step(batch: tuple[torch.Tensor, torch.Tensor], index: int, together: Any = None) -> torch.Tensor:
            x, y = batch
            context = together or rd.get_replica_context()
            if index % program.accumulate == 0:
                for optimizer in optimizers:
                    optimizer.zero_grad()
            denominator = context.all_reduce("SUM", len(x)) if program.adds_up else len(x)
            for number in range(program.passes):
                losses: torch.Tensor = (model(x) - y).square().mean(1) * (1.0 + number)
                last = number == program.passes - 1
                with contextlib.nullcontext() if last else context.no_sync():
                    program.differentiate(scaler.scale(losses.sum() / denominator), model)
            if (index + 1) % program.accumulate == 0 or index + 1 == program.num_steps:
                program.update(optimizers, scaler)
            return losses.detach()

        return step


def state_of(parts: Parts) -> dict[str, Any]:
    """Everything that a program trains, copied."""
    model = parts.model.state_dict()
    states = [optimizer.state_dict()["state"] for optimizer in parts.optimizers]
    return copy.deepcopy({"model": dict(model), "optimizers": states, "scale": parts.scaler.get_scale()})


class Bare:
    """The collectives of one process, and nothing of raydist."""

    @staticmethod
    def all_reduce(op: str, value: Any) -> Any:
        return value

    @staticmethod
    def no_sync() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def train_bare(program: ExchangeProgram) -> dict[str, Any]:
    """The reference: whole batches, and an eye on gradients where bad ones are to be skipped."""
    parts = program.build()
    if program.skips:
        for optimizer in parts.optimizers:
            optimizer.step = _unless_spoilt(optimizer, parts.model)  # type: ignore[method-assign]
    step = program.make_step(parts)
    for index, batch in enumerate(_batches(program)):
        step(batch, index, Bare)
    return state_of(parts)


def _unless_spoilt(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable[..., Any]:
    original = optimizer.step

    def step() -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if all(bool(gradient.to_dense().isfinite().all()) for gradient in gradients):
            original()

    return step


def _batches(program: ExchangeProgram) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    x, y = program.data()
    yield from zip(x.split(program.batch_size), y.split(program.batch_size), strict=True)


def train_under(program: ExchangeProgram, strategy: rd.Strategy, *, loop: bool = False) -> dict[str, Any]:
    """The same under a strategy; with `loop` the replicas run the loop."""
    with strategy.scope():
        parts = program.build()
    step = program.make_step(parts)
    dataset = rd.Dataset.from_tensor_slices(program.data()).batch(program.batch_size)
    batches = strategy.distribute_dataset(dataset)

    def whole(iterator: Any) -> None:
        for index, batch in enumerate(iterator):
            step(batch, index)

    if loop:
        strategy.run(whole, args=(iter(batches),), options=program.options)
    else:
        for index, batch in enumerate(batches):
            strategy.run(step, args=(batch, index), options=program.options)
    return state_of(parts)


def train_on_ranks(
    program: ExchangeProgram, world_size: int, run: OnRanks = run_ranks, *, bucket_bytes: int = 300
) -> list[dict[str, Any]]:
    """The same on replicas that are threads: all of a replica but its process, on the communicators of `run`."""
    parts = program.build()
    copies = [copy.deepcopy(parts) for _ in range(world_size)]

    def body(group: Communicator) -> dict[str, Any]:
        mine = copies[group.rank]
        peers = connected(group, mine, bucket_bytes)
        context = ReplicaContext(ReplicaView(("cpu",) * world_size), peers)
        step = program.make_step(mine)
        for index, (x, y) in enumerate(_batches(program)):
            cut = pieces(len(x), world_size)
            rows = tuple(len(x[piece]) for piece in cut)
            piece = cut[group.rank] if rows[group.rank] else slice(0, 2)
            options = program.options
            choice, op = options.on_nonfinite, options.gradient_reduce_op or rd.ReduceOp.MEAN
            with (
                peers.run(rows, op, padding=True, param_sync_every=1, on_nonfinite=choice),
                enter_replica(context),
            ):
                step((x[piece], y[piece]), index)
        return state_of(mine)

    return run(world_size, body)


def connected(group: Communicator, parts: Parts, bucket_bytes: int) -> SyncPeers:
    peers: list[SyncPeers] = []
    mirror = MirrorReplica(
        group.rank,
        carry_out=lambda *args, **kwargs: peers[0].step_optimizer(*args, **kwargs),
        on_cleared=lambda optimizer: peers[0].note_cleared(
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ),
    )
    held = [*parts.model.modules(), *parts.model.parameters(), *parts.optimizers]
    mirror._applier.add(list(enumerate(held)), [], {})
    policy = NonfinitePolicy(lambda parameters: names_of(parameters, mirror.objects()))
    reducer = GradientReducer(
        group,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=64,
        policy=policy,
        updates=lambda: Updates(mirror.optimizer_log.count, mirror.optimizer_log.rates()),
        expect_rows=lambda: row_tables(mirror.objects()),
    )
    peers.append(SyncPeers(group, reducer, torch.device("cpu"), mirror, policy))
    watch_gradient_readers()
    return peers[0]


def assert_same(found: Any, expected: Any) -> None:
    """All that was trained is what the bare loop trained, to 1e-9."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@st.composite
def exchange_programs(draw: st.DrawFn, models: tuple[str, ...] = ("dense", "shared", "lookup")) -> ExchangeProgram:
    """Any of them."""
    batch_size = draw(st.integers(1, 5))
    num_rows = draw(st.integers(1, 4 * batch_size))
    scaled = draw(st.booleans())
    skips = draw(st.booleans())
    adds_up, accumulate = draw(st.booleans()), draw(st.integers(1, 3))
    # Made by hand in several batches: where they are added up, or some replicas have none, that is an error.
    ways = ["none", "all", "in place"] + ["some"] * (accumulate == 1)
    # One device looks for NaN in backward passes only.
    by_hand = "none" if skips or (adds_up and accumulate > 1) else draw(st.sampled_from(ways))
    # What nobody looks for would make all parameters NaN.
    bad = draw(st.lists(st.integers(0, num_rows - 1), max_size=2)) if scaled or skips else []
    return ExchangeProgram(
        model=draw(st.sampled_from(models)),
        optimizer=draw(st.sampled_from(["sgd", "adam"])),
        num_rows=num_rows,
        batch_size=batch_size,
        accumulate=accumulate,
        passes=draw(st.integers(1, 2)),
        clip=draw(st.booleans()),
        adds_up=adds_up,
        scaled=scaled,
        bad=tuple(bad),
        skips=skips,
        by_hand=by_hand,  # type: ignore[arg-type]  # one of `ways`
        seed=draw(st.integers(0, 1000)),
    )


ALL_AT_ONCE = ExchangeProgram(
    "lookup", "adam", num_rows=11, batch_size=4, accumulate=2, passes=2, clip=True, adds_up=True, scaled=True, bad=(5,)
)


def check_exchanges(strategy: rd.Strategy, max_examples: int = 15) -> None:
    """Whatever a program does with its gradients, N replicas are one device."""

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(exchange_programs(), st.booleans())
    @example(ALL_AT_ONCE, False)
    @example(ALL_AT_ONCE, True)
    def each(program: ExchangeProgram, loop: bool) -> None:
        assert_same(train_under(program, strategy, loop=loop), train_bare(program))

    each()
