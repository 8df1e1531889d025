"""Replicas that hold parts of parameters train what one device trains; checkpoints fit other strategies."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from raydist.context.run_call import add_hint
from raydist.sharding.initial_values import change_modules
from raydist.sharding.sharded_modules import ShardedModules
from raydist.sharding.units import ShardingPlan
from raydist.testing import strategy_contract as contract
from raydist.testing.training_program import Program
from raydist.utils.sharded_tensors import SHARDED
from tests.shared_strategies import KeptStrategies

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

LIMITS = rd.Timeouts(start_s=60, collective_s=20, step_s=60, close_s=5)
RESOURCES = {"CPU": 0.01}


def sharded(count: int, size: int | None = None, **options: Any) -> rd.ShardedStrategy:
    return rd.ShardedStrategy(count, 1, size, timeouts=LIMITS, resources_per_replica=RESOURCES, **options)


@pytest.fixture
def two(kept: KeptStrategies) -> rd.ShardedStrategy:
    return kept.get(rd.ShardedStrategy, sharded, 2)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.out = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.out(self.norm(x))


class Transformer(nn.Module):
    """A tiny language model, whose head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale).flatten(0, 1)


def transformer() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]:
    model = Transformer().double()
    # Adam would blow up the gradient of the keys' bias, which is rounding noise.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, (torch.randint(0, 11, (46, 5)), torch.randint(0, 11, (46, 5)))


def convolutions() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(nn.Conv1d(2, 5, 3), nn.ReLU(), nn.Conv1d(5, 3, 2), nn.Flatten(), nn.Linear(9, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, (torch.randn(46, 2, 6, dtype=torch.float64), torch.randint(0, 3, (46,)))


Make = Callable[[], tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]]


def train(strategy: rd.Strategy, make: Make, accumulate: int = 1) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train with clipped gradients and an uneven last batch; return the model's and the optimizer's state."""
    torch.manual_seed(3)
    with strategy.scope():
        model, optimizer, data = make()

    def step(batch: tuple[torch.Tensor, torch.Tensor], number: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = batch
        if number % accumulate == 0:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        if (number + 1) % accumulate == 0:
            optimizer.step()
        return loss.detach(), norm

    batches = strategy.distribute_dataset(rd.Dataset.from_tensor_slices(data).batch(10))
    for number, batch in enumerate(batches):
        strategy.run(step, args=(batch, number))
    state = optimizer.state_dict()["state"]
    slots = {f"{key}.{name}": value for key, held in state.items() for name, value in held.items()}
    return {name: each.clone() for name, each in model.state_dict().items()}, slots


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((each - other[name]).abs().max()) for name, each in one.items())


def check_training(strategy: rd.Strategy) -> None:
    for make, accumulate in ((transformer, 1), (transformer, 2), (convolutions, 1)):
        expected, slots = train(rd.OneDeviceStrategy("cpu"), make, accumulate)
        found, found_slots = train(strategy, make, accumulate)
        assert difference(expected, found) < 1e-9
        assert difference(slots, found_slots) < 1e-9


def test_two_replicas_train_what_one_device_trains(two: rd.ShardedStrategy) -> None:
    check_training(two)


@pytest.mark.long
@pytest.mark.parametrize(("count", "size"), [(3, None), (4, None), (4, 2)])
def test_more_replicas_train_what_one_device_trains(ray_cluster: None, count: int, size: int | None) -> None:
    with sharded(count, size) as strategy:
        check_training(strategy)


# A failed step ends the strategy, a parameter in a step is a part, and all replicas must use the same parameters.
EXCEPTIONS = {"check_errors", "check_bad_steps", "check_two_at_once", "check_training"}


def test_contract(two: rd.ShardedStrategy) -> None:
    assert {check.__name__ for check in contract.CHECKS} > EXCEPTIONS
    for check in contract.CHECKS:
        if check.__name__ not in EXCEPTIONS:
            check(two)
    for model, clip in (("conv", True), ("linear", True), ("tied", True), ("lstm", False)):
        program = Program(model, "adamw", num_rows=11, batch_size=4, clip=clip, accumulate=2, schedule=True, seed=3)
        contract.check_program(program, two)


def test_a_replica_holds_its_part_and_gathers_a_unit_while_it_computes(two: rd.ShardedStrategy) -> None:
    with two.scope():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        first: Any = model[0]

    def step() -> tuple[int, list[int]]:
        seen: list[int] = []
        part = first.weight.to_local()
        handle = first.register_forward_hook(lambda module, *_: seen.append(module.weight.numel()))
        model(torch.ones(1, 4)).sum().backward()
        handle.remove()
        return part.numel(), seen

    assert two.local_results(two.run(step)) == ((8, [16]), (8, [16]))
    assert first.weight.numel() == 16  # on the driver
    first.weight.data.fill_(2.0)
    assert two.local_results(two.run(lambda: float(first.weight.to_local().sum()))) == (16.0, 16.0)
    assert first.weight.tolist() == [[2.0] * 4] * 4


def test_a_model_is_fitted_evaluated_and_asked(two: rd.ShardedStrategy) -> None:
    def fit(strategy: rd.Strategy) -> tuple[dict[str, list[float]], list[Any]]:
        torch.manual_seed(0)
        rows, labels = torch.randn(30, 6), torch.randint(0, 3, (30,))
        with strategy.scope():
            module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
            model = rd.Model(module)
            model.compile(torch.optim.Adam(module.parameters(), lr=0.05), "cross_entropy")
        data = rd.Dataset.from_tensor_slices((rows, labels)).batch(8)
        history = model.fit(data, epochs=2, validation_data=(rows, labels), verbose=False).history
        return history, model.predict(rows, batch_size=8).tolist()

    history, outputs = fit(rd.OneDeviceStrategy("cpu"))
    found, found_outputs = fit(two)
    assert {name: pytest.approx(each, rel=1e-5) for name, each in history.items()} == found
    torch.testing.assert_close(torch.tensor(found_outputs), torch.tensor(outputs), rtol=1e-4, atol=1e-5)


def test_checkpoints_go_from_each_strategy_to_each(two: rd.ShardedStrategy, tmp_path: Path) -> None:
    mirrored = rd.MirroredStrategy(2, timeouts=LIMITS, resources_per_replica=RESOURCES)
    strategies: dict[str, rd.Strategy] = {"two": two, "one": rd.OneDeviceStrategy("cpu"), "mirrored": mirrored}
    data = rd.Dataset.from_tensor_slices(torch.randn(40, 6, dtype=torch.float64)).batch(7)

    def build(strategy: rd.Strategy) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 1)).double()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        def run() -> None:
            for batch in strategy.distribute_dataset(data):
                strategy.run(step, args=(batch,))

        return model, optimizer, run

    model, _, run = build(strategies["one"])
    run()
    run()
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    for name, strategy in strategies.items():
        model, optimizer, run = build(strategy)
        run()
        rd.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / name)
    for source, name in itertools.product(strategies, strategies):
        if "two" in (source, name):
            model, optimizer, run = build(strategies[name])
            rd.Checkpoint(model=model, optimizer=optimizer).restore(tmp_path / source)
            run()
            assert difference(expected, dict(model.state_dict())) < 1e-9, (source, name)
    mirrored.close()


def on_meta(strategy: rd.Strategy, *, seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    with strategy.scope(), torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    with strategy.scope():
        rd.materialize(model, seed=seed)
        return model, torch.optim.AdamW(model.parameters())


def test_a_model_on_meta_gets_the_values_of_a_plain_one(two: rd.ShardedStrategy, mirrored: Any) -> None:
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    expected = {name: each.clone() for name, each in plain.state_dict().items()}
    optimizer = torch.optim.AdamW(plain.parameters())
    rows = torch.randn(8, 4)
    plain.eval()(rows).square().mean().backward()
    optimizer.step()
    for strategy in (two, mirrored(2)):
        model, meta_optimizer = on_meta(strategy, seed=5)
        model.eval()

        def step(batch: torch.Tensor | None = None, model: Any = model, optimizer: Any = meta_optimizer) -> bool:
            if batch is not None:
                model(batch).square().mean().backward()
                optimizer.step()
            return bool(optimizer.state)

        assert not any(strategy.local_results(strategy.run(step)))
        first: torch.Tensor = model.get_parameter("0.weight")
        assert first.is_meta
        assert {name: torch.equal(each, expected[name]) for name, each in model.state_dict().items()} == dict.fromkeys(
            expected, True
        )
        batch = next(iter(strategy.distribute_dataset(rd.Dataset.from_tensors(rows))))
        assert all(strategy.local_results(strategy.run(step, args=(batch,))))
        assert difference(dict(plain.state_dict()), dict(model.state_dict())) < 1e-6
        assert first.is_meta, "the driver keeps no values"
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(dict(copied.state_dict()), dict(model.state_dict()), rtol=0.0, atol=0.0)
        with pytest.raises(rd.FailedPreconditionError, match="cannot be written to on the driver"):
            first.data.fill_(1.0)
        with pytest.raises(rd.FailedPreconditionError, match="cannot be written to on the driver"), torch.no_grad():
            first.zero_()
        model.load_state_dict(expected)
        assert torch.equal(first.detach(), expected["0.weight"]), "before the next step"
        strategy.run(int)
        assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())


class Recurrent(nn.Module):
    """Parts whose parameters stay whole, beside a divided one, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv2d(2, 3, 2)
        self.memory, self.out, self.scale = (
            nn.GRU(3, 4, batch_first=True),
            nn.Linear(4, 3),
            nn.Parameter(torch.ones(())),
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.memory(self.filter(x).flatten(2).mT)[0][:, -1]) * self.scale.exp()


def test_parts_that_stay_whole_are_trained_and_clipped(two: rd.ShardedStrategy) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]:
        model = Recurrent().double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, (torch.randn(46, 2, 3, 3, dtype=torch.float64), torch.randint(0, 3, (46,)))

    expected, slots = train(rd.OneDeviceStrategy("cpu"), make)
    found, found_slots = train(two, make)
    assert difference(expected, found) < 1e-9
    assert difference(slots, found_slots) < 1e-9


class Listed(nn.Module):
    """A module that reads its parameter from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.scales = [self.scale]

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.scales[0]


class Bare(nn.Module):
    """A module with a parameter and no `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.scale


def test_values_by_a_function(two: rd.ShardedStrategy) -> None:
    def fill(module: nn.Module) -> None:
        for parameter in module.parameters():
            nn.init.normal_(parameter)

    with two.scope():
        with torch.device("meta"):
            model = Bare()
        rd.materialize(model, init=fill, seed=2)
    values = two.local_results(two.run(lambda: model(torch.ones(1, 3)).detach()))[0]
    torch.manual_seed(2)
    assert torch.equal(values[0], torch.empty(3).normal_())
    with pytest.raises(rd.FailedPreconditionError, match="must be given a module on the device"):
        rd.materialize(nn.Linear(1, 1))
    with two.scope(), torch.device("meta"):
        forgotten = nn.Linear(1, 1)
    with pytest.raises(rd.FailedPreconditionError, match=r"gets values by rd.materialize\(module\)"):
        two.run(lambda: forgotten.training)
    with torch.device("meta"):
        without = Bare()
    with pytest.raises(rd.FailedPreconditionError, match=r"must have reset_parameters\(\), but Bare"):
        rd.materialize(without)


@pytest.mark.long
def test_units_compute_in_another_type(ray_cluster: None) -> None:
    with sharded(2, mixed_precision="bf16", policy=nn.Linear) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> tuple[str, str]:
            output = model(torch.ones(2, 4))
            output.float().sum().backward()
            optimizer.step()
            return str(output.dtype), str(model[0].weight.dtype)

        output, weight = strategy.run(step)
        assert strategy.local_results(output) == ("torch.bfloat16",) * 2
        assert strategy.local_results(weight) == ("torch.float32",) * 2


def test_arguments_that_cannot_be() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"shard_size": 0}, "shard_size must be None"),
        ({"policy": "layers"}, "policy must be"),
        ({"policy": [int]}, "policy must be"),
        ({"mixed_precision": torch.int8}, "mixed_precision must be"),
        ({"mixed_precision": "half"}, "mixed_precision must be"),
        ({"num_workers": 0}, "num_workers must be"),
    ]
    for options, message in cases:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            rd.ShardedStrategy(2, **options)


def test_a_size_that_does_not_divide_the_replicas(ray_cluster: None) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="shard_size must divide the number of replicas, got 2 for 3"):
        _ = sharded(3, 2).num_replicas_in_sync


def layer() -> nn.Linear:
    return nn.Linear(2, 2)


def test_parts_that_cannot_be_divided() -> None:
    modules = ShardedModules(ShardingPlan((("shard", 1),)), 0, 1, torch.device("cpu"), 5.0)
    encoder, tied = layer(), layer()
    tied.weight = encoder.weight
    used = layer()
    vars(used)[SHARDED] = True
    cases: list[tuple[list[nn.Module], str]] = [
        ([nn.Sequential(encoder, layer()), nn.Sequential(encoder, nn.Tanh())], "'0.weight' of Sequential is also '0"),
        ([encoder, tied], "'weight' of Linear is also 'weight' of Linear"),
        ([nn.Sequential(used, layer())], "Sequential has '0.weight' beside it"),
        ([nn.Sequential(nn.Embedding(3, 2, sparse=True))], "'0' is an Embedding"),
    ]
    for parts, message in cases:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            modules.shard(list(enumerate(parts)))
    with pytest.raises(rd.InvalidArgumentError, match="'scales' of Listed holds them in a list"):
        change_modules([(0, Listed())], lambda module: setattr(module, "scale", nn.Parameter(torch.zeros(3))))


def test_errors_of_torch_get_a_hint() -> None:
    error = RuntimeError("aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor")
    add_hint(error)
    assert "gather it by parameter.full_tensor()" in error.__notes__[0]


def test_a_module_around_a_used_one(two: rd.ShardedStrategy) -> None:
    with two.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    rows = torch.ones(1, 3)
    two.run(lambda: model(rows).shape)
    with two.scope():
        around = nn.Sequential(model, nn.Softmax(dim=1))
    found = two.local_results(two.run(lambda: around(rows)))[0]
    torch.testing.assert_close(found, model(rows).softmax(1))


@pytest.mark.parametrize("case", ["lbfgs", "tie", "hook"])
def test_what_sharded_modules_cannot_have(ray_cluster: None, case: str) -> None:
    def use(strategy: rd.ShardedStrategy) -> Any:
        with strategy.scope():
            first, second = nn.Linear(2, 2), nn.Linear(2, 2)
            model = nn.Sequential(first, second)
            optimizer: Any = None
            if case == "lbfgs":
                optimizer = torch.optim.LBFGS(model.parameters())
            elif case == "tie":
                second.weight = first.weight
            else:
                first.weight.register_hook(lambda gradient: gradient)
        return strategy.local_results(strategy.run(lambda: (model(torch.ones(1, 2)).sum().item(), optimizer is None)))

    messages = {
        "lbfgs": "LBFGS needs whole tensors",
        "tie": "are the same one, in the units '0' and '1'",
        "hook": "A hook on a parameter needs its whole gradient",
    }
    strategy = sharded(2)
    try:
        with pytest.raises(rd.RaydistError, match=messages[case]):
            use(strategy)
        with pytest.raises(rd.FailedPreconditionError, match="cannot go on after a failed step"):
            strategy.run(int)
    finally:
        strategy._abort(fetch=False)


def penalized(strategy: rd.Strategy) -> dict[str, torch.Tensor]:
    """Train with terms of the loss that use a parameter itself: of rows, and of the parameter alone."""
    torch.manual_seed(1)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight: Any = model.get_parameter("0.weight")
    is_divided = isinstance(strategy, rd.ShardedStrategy)

    def step(batch: torch.Tensor) -> None:
        whole = weight.full_tensor() if is_divided else weight
        optimizer.zero_grad()
        loss = model(batch).square().mean() + (batch @ whole.T).pow(4).mean() + 0.1 * whole.abs().sum()
        loss.backward()
        optimizer.step()

    for batch in strategy.distribute_dataset(rd.Dataset.from_tensor_slices(torch.randn(25, 6).double()).batch(4)):
        strategy.run(step, args=(batch,))
    return {name: each.clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("size", [None, pytest.param(2, marks=pytest.mark.long)])
def test_a_loss_may_use_a_parameter_itself(two: rd.ShardedStrategy, size: int | None) -> None:
    expected = penalized(rd.OneDeviceStrategy("cpu"))
    if size is None:
        assert difference(expected, penalized(two)) < 1e-9
        return
    with sharded(4, size) as strategy:
        assert difference(expected, penalized(strategy)) < 1e-9


def test_a_restore_needs_little_more_than_the_parts(two: rd.ShardedStrategy, tmp_path: Path) -> None:
    """Of 96 MB each replica reads half from the file, and keeps half: beside them, it holds one tensor at a time."""
    layers, width = 24, 1024
    plain = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    rd.Checkpoint(model=plain).save(tmp_path / "plain")
    with two.scope():
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        rd.materialize(model)

    def megabytes(name: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

    def reset() -> float:
        model(torch.ones(1, width))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        return megabytes("VmRSS")

    before = two.local_results(two.run(reset))
    rd.Checkpoint(model=model).restore(tmp_path / "plain")
    peaks = two.local_results(two.run(lambda: megabytes("VmHWM")))
    assert all(peak - at < 70 for peak, at in zip(peaks, before, strict=True)), (peaks, before)
    last = f"{layers - 1}.weight"
    assert torch.equal(model.get_parameter(last).detach(), plain.get_parameter(last))


def test_values_of_a_model_on_meta_go_with_the_strategy(ray_cluster: None) -> None:
    with sharded(2) as strategy:
        model, _ = on_meta(strategy, seed=1)
        strategy.run(lambda: model.training)
        values = {name: each.clone() for name, each in model.state_dict().items()}
    weight = model.get_parameter("0.weight")
    for use in (weight.tolist, lambda: weight + 1, model.state_dict, lambda: weight.copy_(values["0.weight"])):
        with pytest.raises(rd.FailedPreconditionError, match="go with them when the strategy is closed"):
            use()
    model.load_state_dict(values, assign=True)
    assert all(torch.equal(each, values[name]) for name, each in model.state_dict().items())
