"""Objects that count as created under a strategy's scope."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from raydist.core.errors import FailedPreconditionError
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.scope import Scope, ScopeCheck
from raydist.parameter_servers.sharded_embedding import ShardedEmbedding
from tests.mirroring.in_process import Mirror


class Positions(nn.Module):
    """A module with a buffer and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.get_buffer("positions")


def loaded_positions() -> nn.Module:
    file = io.BytesIO()
    torch.save(Positions(), file)
    file.seek(0)
    module: nn.Module = torch.load(file, weights_only=False)
    return module


def test_registered_tensors_are_marked_by_the_innermost_scope_of_their_thread() -> None:
    scope, inner = Scope(), Scope()
    elsewhere: list[nn.Linear] = []
    constructor, restorer = nn.Parameter.__new__, nn.Module.__setstate__
    with contextlib.suppress(ZeroDivisionError), scope.enter():
        inside, bare = nn.BatchNorm1d(1), nn.Parameter(torch.zeros(1))
        thread = threading.Thread(target=lambda: elsewhere.append(nn.Linear(1, 1)))
        thread.start()
        thread.join(10)
        with inner.enter():
            layer = nn.Linear(1, 1)
        after = nn.Linear(1, 1)
        _ = 1 / 0
    assert type(bare) is nn.Parameter
    assert all(one in scope for one in (bare, inside, inside.weight, inside.running_mean, after.weight))
    assert (layer.weight in inner, layer.weight in scope) == (True, False)
    outside = nn.Linear(1, 1)
    others = (outside, outside.weight, nn.Parameter(torch.zeros(1)), elsewhere[0].weight)
    assert not any(one in scope for one in others)
    assert nn.Parameter.__new__ is constructor
    assert nn.Module.__setstate__ is restorer
    assert not scope.is_active
    del bare, inside, layer, after
    gc.collect()
    assert scope._marks == {}  # marks keep nothing alive


def test_what_was_made_outside_is_refused_and_nothing_changes(mirror: Mirror, layer: nn.Linear) -> None:
    with mirror.scope():
        model = nn.Sequential(nn.Linear(1, 1))
    mirror.run(lambda: model.training)
    norm, cast, foreign = nn.BatchNorm1d(1, affine=False), Positions(), nn.Linear(1, 1)
    with mirror.scope():
        cast.double()
    optimizer = torch.optim.SGD(list(foreign.parameters()), lr=1.0)
    refused: dict[str, Callable[[], object]] = {
        "a BatchNorm1d was not": lambda: norm.training,
        "a Positions was not": lambda: cast(torch.ones(2)),
        r"param_groups\[0\] of optimizer SGD was not": lambda: optimizer.step(),
        "Linear.* was not": lambda: (layer, foreign),
    }
    for message, step in refused.items():
        with pytest.raises(FailedPreconditionError, match=message):
            mirror.run(step)
    assert type(layer.weight) is nn.Parameter
    assert mirror.run(lambda: layer.weight.tolist()) == [[[1.0, 2.0]]] * 2
    activation = nn.ReLU()  # without tensors it may come from anywhere
    assert mirror.run(lambda: activation(torch.tensor(-1.0)).item()) == [0.0, 0.0]
    model.append(nn.Linear(1, 1))
    with pytest.raises(FailedPreconditionError, match="parameter 'weight' of module Linear"):
        mirror.run(lambda: model.training)


def test_buffers_that_were_cast_copied_or_loaded_inside(mirror: Mirror) -> None:
    ways: dict[str, Callable[[], nn.Module]] = {
        "cast in a container": lambda: nn.Sequential(Positions()).double(),
        "cast and copied": lambda: copy.deepcopy(Positions().double()),
        "loaded": loaded_positions,
        "spectral copied": lambda: copy.deepcopy(parametrizations.spectral_norm(nn.Linear(2, 2)).double()),
    }

    def step(module: nn.Module) -> list[float]:
        buffer = next(module.buffers())
        buffer.add_(1)
        result: list[float] = module(torch.ones(2, dtype=buffer.dtype)).tolist()
        return result

    for way, make in ways.items():
        with mirror.scope():
            module = make()
        before = next(module.buffers()).clone()
        first, second = mirror.run(step, module)
        assert first == second, way
        assert torch.equal(next(module.buffers()), before + 1) or isinstance(module, nn.Linear), way


@pytest.mark.parametrize("after_a_step", [False, True])
def test_deepcopy_inside_is_mirrored_and_outside_a_plain_snapshot(after_a_step: bool, mirror: Mirror) -> None:
    with mirror.scope():
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    if after_a_step:
        mirror.run(lambda: model[0].weight.data.fill_(1.0).sum())
    with mirror.scope():
        twin = copy.deepcopy(model)
    before = model[0].weight.tolist()
    snapshot = copy.deepcopy(model[0])
    assert (type(snapshot), type(snapshot.weight)) == (nn.Linear, nn.Parameter)
    mirror.run(lambda: (twin[0].weight.data.fill_(5.0).sum(), model[0].weight.data.fill_(3.0).sum()))
    assert twin[0].weight.tolist() == [[5.0, 5.0]] * 2
    assert model[0].weight.tolist() == [[3.0, 3.0]] * 2
    assert snapshot.weight.tolist() == before
    assert len(mirror.replicas[0].parameters()) == 4
    with pytest.raises(FailedPreconditionError):
        mirror.run(lambda: snapshot.training)


def test_closed_driver_refuses(mirror: Mirror) -> None:
    mirror.driver.release()
    mirror.driver.release()
    with pytest.raises(FailedPreconditionError, match="TestStrategy must be open"):
        mirror.run(lambda: 1)
    with pytest.raises(FailedPreconditionError, match="must be open"):
        mirror.scope()


@pytest.mark.parametrize("inside", [False, True])
def test_deepcopy_of_an_optimizer_takes_its_parameters_along(inside: bool, mirror: Mirror, layer: nn.Linear) -> None:
    with mirror.scope():
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.5)

    def step(own: torch.optim.Optimizer) -> list[float]:
        (weight,) = own.param_groups[0]["params"]
        weight.sum().backward()
        own.step()
        found: list[float] = weight.flatten().tolist()
        return found

    assert mirror.run(step, optimizer) == [[0.0, 1.0]] * 2
    with mirror.scope() if inside else contextlib.nullcontext():
        twin = copy.deepcopy(optimizer)
    (copied,) = twin.param_groups[0]["params"]
    assert (type(twin), type(copied)) == (torch.optim.SGD, nn.Parameter)
    assert twin.state[copied]["momentum_buffer"].tolist() == [[1.0, 1.0]]
    mirror.run(step, optimizer)
    assert copied.tolist() == [[0.0, 1.0]]
    if inside:
        assert mirror.run(step, twin) == [[-1.5, -0.5]] * 2
        assert copied.tolist() == [[-1.5, -0.5]]
    else:
        with pytest.raises(FailedPreconditionError, match=r"param_groups\[0\] of optimizer SGD was not"):
            mirror.run(step, twin)


def origin(known: tuple[Any, ...] = ()) -> ScopeCheck:
    table = DriverTable()
    for obj in known:
        table.add(obj, table.reserve())
    return ScopeCheck("Mine", Scope(), lambda: ("cuda",), table)


def test_a_new_parameter_is_named_by_its_path() -> None:
    model: Any = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(1, 1)))
    linear = model[1][0]
    weight = linear.weight
    with pytest.raises(FailedPreconditionError, match=r"'weight' of module Linear \(parameter '1.0.weight' of"):
        origin(known=(model,)).require([linear, weight])
    with pytest.raises(FailedPreconditionError, match="Mine; parameter '1.0.weight' of module Sequential was not"):
        origin(known=(model,)).require([weight])
    with pytest.raises(FailedPreconditionError, match="a parameter of shape"):
        origin().require([weight])


def test_variables_must_stay_on_the_device_of_their_strategy_and_sharded_embeddings_need_servers() -> None:
    model, embedding = nn.BatchNorm1d(1, device="meta"), ShardedEmbedding(10, 2)
    refused: list[tuple[list[Any], str]] = [
        ([model, model.weight], r"\(cpu or cuda\); parameter 'weight' of module .* moved to meta"),
        ([model, model.running_mean], "buffer 'running_mean' of module BatchNorm1d was moved to meta"),
        ([embedding, embedding.weight], r"Mine has neither\. Use ParameterServerStrategy"),
    ]
    for objects, message in refused:
        with pytest.raises(FailedPreconditionError, match=message):
            origin().require(objects)
