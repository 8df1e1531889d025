"""Replicas that compute stages of a module train what one device trains; checkpoints fit other strategies."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torchmetrics import SumMetric

import raydist as rd
from raydist.sharding.initial_values import INITIAL_VALUES, InitialValues, materialize_module
from raydist.sharding.pipelined_module import PipelinedModule
from raydist.sharding.stages import PipelinePlan, map_stages
from raydist.testing import strategy_contract as contract
from tests.shared_strategies import KeptStrategies
from tests.strategies.test_sharded import Make, convolutions

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

LIMITS = rd.Timeouts(start_s=60, collective_s=20, step_s=60, close_s=5)
RESOURCES = {"CPU": 0.01}


def pipeline(stages: int, replicas: int = 1, microbatches: int | None = None, **options: Any) -> rd.PipelineStrategy:
    return rd.PipelineStrategy(
        stages, replicas, microbatches, timeouts=LIMITS, resources_per_replica=RESOURCES, **options
    )


@pytest.fixture
def two(kept: KeptStrategies) -> rd.PipelineStrategy:
    return kept.get(rd.PipelineStrategy, pipeline, 2)


@pytest.fixture
def four(kept: KeptStrategies) -> rd.PipelineStrategy:
    """Two pipelines of two stages."""
    return kept.get(rd.PipelineStrategy, lambda size: pipeline(2, size // 2), 4)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.out = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.out(self.norm(x))


class Transformer(nn.Module):
    """A tiny language model, written as for one device."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embedding, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1])) * self.scale
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x)).flatten(0, 1)


def transformer() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]:
    model = Transformer().double()
    # Adam would blow up the gradient of the keys' bias, which is rounding noise.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, (torch.randint(0, 11, (46, 5)), torch.randint(0, 11, (46, 5)))


def perceptron() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, (torch.randn(46, 4, dtype=torch.float64), torch.randint(0, 3, (46,)))


def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, targets.flatten())


def train(strategy: rd.Strategy, make: Make, accumulate: int = 1) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """Train with clipped gradients and an uneven last batch; return the states of model and optimizer, and losses."""
    torch.manual_seed(3)
    with strategy.scope():
        model, optimizer, data = make()
        total = SumMetric()
    in_stages = isinstance(strategy, rd.PipelineStrategy)

    def step(batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        inputs, targets = batch
        if number % accumulate == 0:
            optimizer.zero_grad()
        if in_stages:
            loss = rd.get_replica_context().pipeline_step((inputs, targets), loss_of, model)
        else:
            loss = loss_of(model(inputs), targets)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        if (number + 1) % accumulate == 0:
            optimizer.step()
        shown: torch.Tensor = loss.detach() * len(inputs)
        total.update(shown)
        return shown

    batches = strategy.distribute_dataset(rd.Dataset.from_tensor_slices(data).batch(10))
    losses = []
    for number, batch in enumerate(batches):
        loss = strategy.reduce("SUM", strategy.run(step, args=(batch, number)), axis=None)
        losses.append(float(torch.as_tensor(loss)))
    assert float(total.compute()) == pytest.approx(sum(losses), rel=1e-6)
    state = optimizer.state_dict()["state"]
    slots = {f"{key}.{name}": value for key, held in state.items() for name, value in held.items()}
    return {name: each.clone() for name, each in model.state_dict().items()}, slots, losses


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((each - other[name]).abs().max()) for name, each in one.items())


def check_training(strategy: rd.Strategy) -> None:
    for make, accumulate in ((transformer, 1), (transformer, 2), (convolutions, 1), (perceptron, 1)):
        expected, slots, losses = train(rd.OneDeviceStrategy("cpu"), make, accumulate)
        found, found_slots, found_losses = train(strategy, make, accumulate)
        assert difference(expected, found) < 1e-9
        assert difference(slots, found_slots) < 1e-9
        assert found_losses == pytest.approx(losses, abs=1e-9)


def test_two_stages_train_what_one_device_trains(two: rd.PipelineStrategy) -> None:
    assert two.num_replicas_in_sync == 1
    check_training(two)


@pytest.mark.long
@pytest.mark.parametrize(
    ("stages", "replicas", "microbatches", "schedule"),
    [(2, 1, 1, "1F1B"), (2, 2, 4, "GPipe"), (3, 1, 8, "1F1B"), (3, 1, 2, "1F1B"), (3, 2, 3, "1F1B"), (1, 2, 2, "1F1B")],
)
def test_more_stages_and_replicas_train_what_one_device_trains(
    ray_cluster: None, stages: int, replicas: int, microbatches: int, schedule: str
) -> None:
    with pipeline(stages, replicas, microbatches, schedule=schedule) as strategy:
        assert strategy.num_replicas_in_sync == replicas
        check_training(strategy)


def test_replicas_without_rows_and_other_results_of_the_loss(four: rd.PipelineStrategy) -> None:
    def train_rows(strategy: rd.Strategy, empty_batch: Any) -> list[torch.Tensor]:
        torch.manual_seed(2)
        in_stages = isinstance(strategy, rd.PipelineStrategy)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            if in_stages:
                loss, sums = rd.get_replica_context().pipeline_step((batch, None), with_outputs, model)
                assert loss.ndim == 0
                assert len(sums["rows"]) == len(batch)
            else:
                with_outputs(model(batch), None)[0].backward()
            optimizer.step()

        def with_outputs(output: torch.Tensor, targets: None) -> Any:
            counts = rd.get_replica_context().num_rows != 0
            return output.square().mean() * (1 if counts else torch.inf), {"rows": output.sum(1), "all": output.sum()}

        data = rd.Dataset.from_tensor_slices(torch.randn(7, 2, dtype=torch.float64)).batch(3)
        for batch in strategy.distribute_dataset(data):  # the last one has a row for one replica only
            strategy.run(step, args=(batch,), options=rd.RunOptions(empty_batch=empty_batch))
        return [each.detach().clone() for each in model.parameters()]

    expected = train_rows(rd.OneDeviceStrategy("cpu"), "pad")
    for empty_batch in ("pad", "zero_rows"):
        found = train_rows(four, empty_batch)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(expected, found, strict=True))


def test_contract(four: rd.PipelineStrategy) -> None:
    """Others call modules in steps, draw batches inside the replicas, or fail on purpose."""
    names = {"numbers", "values", "collectives", "scope", "modes", "copies", "metrics"}
    checks = {check.__name__.removeprefix("check_"): check for check in contract.CHECKS}
    assert checks.keys() > names
    for name, check in checks.items():
        if name in names:
            check(four)


def test_no_replica_holds_another_stage_and_the_driver_reads_all(two: rd.PipelineStrategy, tmp_path: Path) -> None:
    torch.manual_seed(1)
    with two.scope():
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = {name: each.clone() for name, each in model.state_dict().items()}

    def step(path: str) -> None:
        rd.get_replica_context().pipeline_step((torch.randn(16, 2), None), lambda out, _: (out**3).mean(), model)
        storages = [each.untyped_storage() for each in model.parameters()]
        here = [0 if each.device.type == "meta" else each.nbytes() for each in storages]
        stage = rd.get_replica_context().device_mesh.get_local_rank("stage")
        with open(f"{path}/{stage}", "w") as file:
            file.write(repr((here, [each.grad is not None for each in model.parameters()])))

    two.run(step, args=(str(tmp_path),))
    gradients = [each.grad for each in model.parameters()]
    assert all(isinstance(each, torch.Tensor) for each in gradients)
    assert (tmp_path / "0").read_text() == repr(([24, 12, 12, 12, 0, 0, 0, 0], [True] * 4 + [False] * 4))
    assert (tmp_path / "1").read_text() == repr(([0, 0, 0, 0, 36, 12, 12, 12], [False] * 4 + [True] * 4))
    after = model.state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == [
        *("1.running_mean", "1.running_var", "1.num_batches_tracked"),
        *("3.running_mean", "3.running_var", "3.num_batches_tracked"),
    ]
    two.run(lambda: optimizer.step())
    assert sorted(optimizer.state_dict()["state"]) == [*range(8)]
    with torch.no_grad():
        model.get_parameter("2.weight").fill_(7.0)  # a write of the driver reaches the stage that holds the parameter
    assert two.run(lambda: model[2].weight).tolist() == [[7.0] * 3] * 3
    model.load_state_dict(before)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_evaluation_random_numbers_and_activation_checkpoints(two: rd.PipelineStrategy) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2))

        def forward(self, x: torch.Tensor, *, again: bool) -> Any:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            return x

    with two.scope():
        model = Net()

    def step(*, trains: bool, again: bool) -> Any:
        context = rd.get_replica_context()
        model.train(trains)
        model.zero_grad()
        torch.manual_seed(5)
        with torch.set_grad_enabled(trains):
            loss, outputs = context.pipeline_step(
                ({"x": torch.ones(64, 4), "again": again}, None), lambda out, _: (out.square().mean(), out), model
            )
        return loss, outputs

    with torch.random.fork_rng(), torch.no_grad():
        alone = Net()
        alone.load_state_dict(model.state_dict())
        expected = alone.eval()(torch.ones(64, 4), again=False)
    loss, outputs = two.run(step, kwargs={"trains": False, "again": False})
    assert torch.allclose(torch.as_tensor(outputs), expected, atol=1e-6)
    assert float(loss) == pytest.approx(float(expected.square().mean()), rel=1e-5)
    assert all(each.grad is None for each in model.parameters())
    with torch.inference_mode():
        _, inferred = two.run(step, kwargs={"trains": False, "again": False})
    _, evaluated = two.run(step, kwargs={"trains": False, "again": False})
    assert torch.equal(torch.as_tensor(inferred), torch.as_tensor(evaluated))
    _, once = two.run(step, kwargs={"trains": True, "again": False})
    gradients = [torch.as_tensor(each.grad) for each in model.parameters()]
    _, twice = two.run(step, kwargs={"trains": True, "again": True})
    assert torch.equal(torch.as_tensor(once), torch.as_tensor(twice))
    assert not torch.allclose(torch.as_tensor(once), expected, atol=1e-3), "dropout is on"
    recomputed = [torch.as_tensor(each.grad) for each in model.parameters()]
    assert all(map(torch.equal, gradients, recomputed))
    with torch.no_grad():
        for layer in model.layers:
            layer.get_parameter("0.weight").copy_(torch.eye(4))
            layer.get_parameter("0.bias").zero_()
    _, outputs = two.run(step, kwargs={"trains": True, "again": False})
    assert 0.1 < float((torch.as_tensor(outputs) != 0).double().mean()) < 0.4, "stages draw different numbers"


def continue_training(strategy: rd.Strategy, path: Path, *, saves: bool) -> dict[str, Any]:
    """Train for some steps and save; or restore, train 20 steps, and return the state."""
    torch.manual_seed(3 if saves else 4)
    with strategy.scope():
        model, optimizer, (inputs, targets) = perceptron()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    in_stages = isinstance(strategy, rd.PipelineStrategy)
    checkpoint = rd.Checkpoint(model=model, optimizer=optimizer, schedule=schedule)
    if not saves:
        checkpoint.restore(path)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        optimizer.zero_grad()
        if in_stages:
            rd.get_replica_context().pipeline_step(batch, loss_of, model)
        else:
            loss_of(model(batch[0]), batch[1]).backward()
        optimizer.step()

    torch.manual_seed(5)
    data = rd.Dataset.from_tensor_slices((torch.randn(40, 4, dtype=torch.float64), torch.randint(0, 3, (40,))))
    for batch in strategy.distribute_dataset(data.batch(8).repeat(1 if saves else 4)):
        strategy.run(step, args=(batch,))
        schedule.step()
    if saves:
        checkpoint.save(path)
    slots = {
        f"{key}.{name}": value for key, held in optimizer.state_dict()["state"].items() for name, value in held.items()
    }
    return {**{name: each.clone() for name, each in model.state_dict().items()}, **slots}


def test_checkpoints_fit_one_device(two: rd.PipelineStrategy, tmp_path: Path) -> None:
    alone = rd.OneDeviceStrategy("cpu")
    saved = [continue_training(each, tmp_path / str(number), saves=True) for number, each in enumerate((alone, two))]
    assert difference(*saved) < 1e-9
    expected = continue_training(alone, tmp_path / "0", saves=False)
    for strategy, path in ((two, "0"), (two, "1"), (alone, "1")):
        assert difference(continue_training(strategy, tmp_path / path, saves=False), expected) < 1e-9


def divide_hidden_values(model: Any, mesh: Any) -> None:
    parallelize_module(model, mesh["tensor"], {"2": ColwiseParallel(output_layouts=Replicate())})


@pytest.mark.long
@pytest.mark.timeout(600)
def test_checkpoints_go_from_each_strategy_to_each(four: rd.PipelineStrategy, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"timeouts": LIMITS, "resources_per_replica": RESOURCES}
    strategies: dict[str, rd.Strategy] = {
        "alone": rd.OneDeviceStrategy("cpu"),
        "sharded": rd.ShardedStrategy(2, 1, **settings),
        "hybrid": rd.ShardedStrategy(4, 1, shard_size=2, **settings),
        "tensor": rd.MeshStrategy({"tensor": 2}, divide_hidden_values, **settings),
        "pipeline": four,
    }
    for name, strategy in strategies.items():
        continue_training(strategy, tmp_path / name, saves=True)
    expected = continue_training(strategies["alone"], tmp_path / "alone", saves=False)
    found = {
        (source, name): difference(continue_training(strategy, tmp_path / source, saves=False), expected)
        for source in strategies
        for name, strategy in strategies.items()
    }
    for strategy in strategies.values():
        if strategy is not four:
            strategy.close()
    assert {pair: each for pair, each in found.items() if not each < 1e-9} == {}
    with pipeline(3) as three:
        assert difference(continue_training(three, tmp_path / "pipeline", saves=False), expected) < 1e-9


class Skips(nn.Module):
    """Reaches around the parts between."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.kind = nn.Linear(2, 2), kind
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.last = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        first = self.first(x)
        if self.kind == "order":
            first = self.last(first)
        y = self.layers[0](first)
        y = y if self.kind == "never" else self.layers[1](y)
        if self.kind == "skip":
            y = self.last(y + first)
        elif self.kind == "in place":
            zeros = torch.zeros_like(x)
            zeros[:] = first
        elif self.kind == "value" and float(first.sum()) > 0:
            y = -y
        elif self.kind == "parameter":
            y = y + self.first.bias
        return y


def pass_through(make: Callable[[], nn.Module], x: torch.Tensor, plan: PipelinePlan) -> Any:
    """Compute the stages of a module one after the other, as the replicas of a pipeline do."""
    torch.manual_seed(0)
    model = make()
    received: Any = ()
    for stage in range(plan.num_stages):
        mine = copy.deepcopy(model)
        module = PipelinedModule(mine, map_stages(mine, plan), stage, plan.num_stages, None, torch.device("cpu"))
        received = module.run(module.record((x,), {}), (x,), {}, received)
    return received


def tied() -> nn.Module:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layers[1].weight = layers[0].weight
    return layers


CASES: list[tuple[Callable[[], nn.Module], type[Exception], str]] = [
    (lambda: nn.Sequential(nn.Linear(2, 2)), rd.InvalidArgumentError, "2 stages for Sequential with 1 layers"),
    (lambda: nn.Linear(2, 2), rd.InvalidArgumentError, "with 0 layers"),
    (tied, rd.InvalidArgumentError, "are the same one, in the stages 0 and 1"),
    (lambda: Skips("order"), rd.InvalidArgumentError, "'last', which is in stage 1, is called in stage 0"),
    (lambda: Skips("skip"), rd.InvalidArgumentError, "an argument of 'last' depends on another value"),
    (lambda: Skips("parameter"), rd.InvalidArgumentError, "the result of the module depends on another value"),
    (lambda: Skips("in place"), rd.InvalidArgumentError, "__setitem__ would write values of one stage"),
    (lambda: Skips("value"), rd.FailedPreconditionError, "needs the values of a tensor"),
    (lambda: Skips("never"), rd.InvalidArgumentError, "it ended in stage 0 of 2"),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_modules_that_cannot_be_cut(case: int) -> None:
    make, kind, message = CASES[case]
    with pytest.raises(kind, match=message):
        pass_through(make, torch.ones(4, 2), PipelinePlan(2, 2, "1F1B"))


def test_finding_what_stages_exchange_changes_nothing(ray_cluster: None) -> None:
    class Counts(nn.Module):
        calls: torch.Tensor
        last: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("last", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            for layer in self.layers:
                x = layer(x)
                self.last = x[0].detach()
            return x

    model = Counts()
    before = {name: (each, each.clone()) for name, each in model.named_buffers()}
    plan = PipelinePlan(2, 1, "1F1B")
    PipelinedModule(model, map_stages(model, plan), 0, 2, None, torch.device("cpu")).record((torch.ones(4, 2),), {})
    after = dict(model.named_buffers())
    assert all(after[name] is each and torch.equal(each, value) for name, (each, value) in before.items())


@pytest.mark.parametrize(
    ("split", "num_stages"),
    [
        (None, 1),
        (None, 4),
        (("blocks.1", "norm"), 3),
        ((Block,), 2),
        (lambda name, module: name.startswith("blocks.") and isinstance(module, Block), 3),
        (("head",), 2),
    ],
)
def test_stages_compute_what_the_module_computes(split: Any, num_stages: int) -> None:
    tokens = torch.randint(0, 11, (3, 5))
    torch.manual_seed(0)
    expected = Transformer()(tokens)
    found = pass_through(Transformer, tokens, PipelinePlan(num_stages, 1, "1F1B", split))
    assert torch.equal(found, expected)


def compiled(*, whole: bool) -> nn.Module:
    model = Transformer()
    if whole:
        return cast("nn.Module", torch.compile(model, backend="eager"))
    model.blocks[0].compile(backend="eager")
    model.blocks[3] = cast("nn.Module", torch.compile(model.blocks[3], backend="eager"))
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler reads it
def test_autocast_and_compiled_layers(ray_cluster: None) -> None:
    tokens = torch.randint(0, 11, (3, 5))
    torch.manual_seed(0)
    model = Transformer()
    plan = PipelinePlan(2, 1, "1F1B", ("blocks.2",))
    assert torch.equal(pass_through(lambda: compiled(whole=False), tokens, plan), model(tokens))
    with pytest.raises(rd.InvalidArgumentError, match="must not be compiled as a whole"):
        pass_through(lambda: compiled(whole=True), tokens, PipelinePlan(2, 1, "1F1B"))
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = model(tokens), pass_through(Transformer, tokens, plan)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, expected)


def test_arguments_that_cannot_be(ray_cluster: None) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_stages": 0}, "num_stages must be a number >= 1, got 0"),
        ({"num_stages": 2, "num_replicas": True}, "num_replicas must be a number"),
        ({"num_stages": 2, "num_microbatches": 0}, "num_microbatches must be a number"),
        ({"num_stages": 2, "schedule": "1f1b"}, "schedule must be one of 1F1B, GPipe"),
        ({"num_stages": 3, "split": ["a"]}, "first submodule of each stage but the first one, 2 of them"),
        ({"num_stages": 2, "split": 5}, "split must be names of submodules"),
    ]
    for arguments, message in cases:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            rd.PipelineStrategy(**arguments)
    for names, message in ((("blocks.9",), "none called 'blocks.9'"), (("norm", "blocks.1"), "in the order")):
        with pytest.raises(rd.InvalidArgumentError, match=message):
            map_stages(Transformer(), PipelinePlan(len(names) + 1, 1, "1F1B", names))
    strategy = rd.PipelineStrategy(2, devices=3, resources_per_replica=RESOURCES)
    with pytest.raises(rd.InvalidArgumentError, match=r"a device for each stage of each pipeline, 2 x 1, got 3"):
        _ = strategy.num_replicas_in_sync
    with pytest.raises(rd.FailedPreconditionError, match="runs the stages of PipelineStrategy"):
        rd.OneDeviceStrategy("cpu").run(lambda: rd.get_replica_context().pipeline_step((torch.ones(1), None), max))


def count(model: nn.Module, total: SumMetric) -> Any:
    def loss_fn(output: torch.Tensor, targets: None) -> torch.Tensor:
        total.update(1.0)
        return output.mean()

    return step_of((torch.ones(4, 2), None), model, loss_fn)


MISTAKES: list[tuple[Callable[[nn.Module, SumMetric], Any], str]] = [
    (lambda model, _: model(torch.ones(4, 2)), "one stage of a Sequential, so a step cannot call it"),
    (lambda model, _: model.get_submodule("0")(torch.ones(4, 2)), "so a step cannot call it"),
    (lambda model, _: step_of(torch.ones(4, 2), model), r"a pair \(inputs, targets\)"),
    (lambda model, _: step_of((torch.ones(4, 2), torch.ones(3)), model), "the same number of rows"),
    (
        lambda model, _: step_of((torch.ones(4, 2), None), model, lambda out, _: out),
        "loss_fn must return the mean loss",
    ),
    (lambda model, _: step_of((torch.ones(4, 2), None), nn.Linear(1, 1)), "got 0 to choose from"),
    (count, "loss_fn must not update metrics"),
]


def step_of(batch: Any, model: nn.Module, loss_fn: Any = None) -> Any:
    return rd.get_replica_context().pipeline_step(batch, loss_fn or (lambda out, _: out.mean()), model)


@pytest.mark.long
@pytest.mark.parametrize("case", range(len(MISTAKES)))
def test_a_step_that_cannot_be_ends_the_strategy_at_once(ray_cluster: None, case: int) -> None:
    mistake, message = MISTAKES[case]
    strategy = pipeline(2)
    try:
        with strategy.scope():
            model, total = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), SumMetric()
        began = time.monotonic()
        with pytest.raises((rd.FailedPreconditionError, rd.InvalidArgumentError), match=message):
            strategy.local_results(strategy.run(mistake, args=(model, total)))
        assert time.monotonic() - began < LIMITS.collective_s, "the other stage does not wait for its limit"
        with pytest.raises(rd.FailedPreconditionError, match="cannot go on after a failed step"):
            strategy.run(lambda: 1)
    finally:
        strategy._abort(fetch=False)


@pytest.mark.parametrize("frozen", ["0", "2"])
def test_a_stage_that_is_not_trained(two: rd.PipelineStrategy, frozen: str) -> None:
    torch.manual_seed(6)
    with two.scope():
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    model.get_submodule(frozen).requires_grad_(False)
    alone = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    alone.load_state_dict(model.state_dict())
    alone.get_submodule(frozen).requires_grad_(False)
    inputs = torch.randn(8, 2, dtype=torch.float64)
    alone(inputs).square().mean().backward()
    torch.optim.SGD(alone.parameters(), lr=0.1, weight_decay=0.1).step()

    def step() -> None:
        step_of((inputs, None), model, lambda out, _: out.square().mean())
        optimizer.step()

    two.run(step)
    assert difference(dict(alone.state_dict()), dict(model.state_dict())) < 1e-12


def test_a_module_that_the_driver_never_holds(two: rd.PipelineStrategy) -> None:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2))

    with two.scope():
        with torch.device("meta"):
            model = layers()
        rd.materialize(model, seed=7)

    def step() -> Any:
        return step_of((torch.ones(4, 2), None), model)

    loss = two.run(step)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        alone = layers()
    assert difference(dict(alone.state_dict()), dict(model.state_dict())) == 0
    assert float(loss) == pytest.approx(float(alone(torch.ones(4, 2)).detach().mean()), rel=1e-5)


def test_parameters_of_other_stages_have_memory_one_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    most = 0
    original = nn.Linear.reset_parameters

    def reset(part: nn.Linear) -> None:
        nonlocal most
        original(part)
        most = max(most, sum(not each.is_meta for each in model.parameters()))

    monkeypatch.setattr(nn.Linear, "reset_parameters", reset)
    vars(model)[INITIAL_VALUES] = InitialValues(None, 7)
    materialize_module(model, torch.device("cpu"), lambda name: name.startswith("4."))
    assert [name for name, each in model.named_parameters() if not each.is_meta] == ["4.weight", "4.bias"]
    assert most == 4, "of the stage's part and another one"
