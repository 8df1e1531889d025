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


def test_registered_tensors_are_marked() -> None:
    scope = Scope()
    outside = nn.Linear(1, 1)
    with scope.enter():
        inside, bare = nn.BatchNorm1d(1), nn.Parameter(torch.zeros(1))
    assert bare in scope
    assert type(bare) is nn.Parameter
    assert nn.Parameter(torch.zeros(1)) not in scope
    assert inside in scope
    assert inside.weight in scope
    assert inside.running_mean in scope
    assert outside not in scope
    assert outside.weight not in scope


def test_innermost_scope_counts() -> None:
    outer, inner = Scope(), Scope()
    with outer.enter():
        with inner.enter():
            layer = nn.Linear(1, 1)
        after = nn.Linear(1, 1)
    assert (layer.weight in inner, layer.weight in outer) == (True, False)
    assert after.weight in outer


def test_other_threads_are_outside() -> None:
    scope = Scope()
    made: list[nn.Linear] = []
    with scope.enter():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(1, 1)))
        thread.start()
        thread.join(10)
    assert made[0].weight not in scope


def test_hooks_are_removed_after_an_error() -> None:
    scope = Scope()
    constructor, restorer = nn.Parameter.__new__, nn.Module.__setstate__
    with pytest.raises(ZeroDivisionError), scope.enter():
        _ = 1 / 0
    assert nn.Parameter.__new__ is constructor
    assert nn.Module.__setstate__ is restorer
    assert not scope.is_active
    assert nn.Linear(1, 1).weight not in scope


def test_marks_do_not_keep_alive() -> None:
    scope = Scope()
    with scope.enter():
        layer = nn.Linear(1, 1)
    del layer
    gc.collect()
    assert scope._marks == {}


def test_buffers_only_module_made_outside() -> None:
    norm = nn.BatchNorm1d(1, affine=False)
    with pytest.raises(FailedPreconditionError, match="a BatchNorm1d was not"):
        Mirror().run(lambda: norm.training)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Positions().double(),
        lambda: nn.Sequential(Positions()).double(),
        lambda: copy.deepcopy(Positions()),
        lambda: copy.deepcopy(Positions().double()),
        loaded_positions,
        lambda: parametrizations.spectral_norm(nn.Linear(2, 2)).double(),
        lambda: copy.deepcopy(parametrizations.spectral_norm(nn.Linear(2, 2)).double()),
    ],
    ids=["cast", "cast in a container", "copied", "cast and copied", "loaded", "spectral", "spectral copied"],
)
def test_buffers_that_were_cast_copied_or_loaded_inside(make: Callable[[], nn.Module], mirror: Mirror) -> None:
    with mirror.scope():
        module = make()
    kind = next(module.buffers()).dtype

    def step() -> list[float]:
        next(module.buffers()).add_(1)
        result: list[float] = module(torch.ones(2, dtype=kind)).tolist()
        return result

    before = next(module.buffers()).clone()
    first, second = mirror.run(step)
    assert first == second
    assert torch.equal(next(module.buffers()), before + 1) or isinstance(module, nn.Linear)


def test_buffers_of_a_module_made_outside_and_cast_inside() -> None:
    mirror, module = Mirror(), Positions()
    with mirror.scope():
        module.double()
    with pytest.raises(FailedPreconditionError, match="a Positions was not"):
        mirror.run(lambda: module(torch.ones(2)))


def test_a_child_added_outside_after_the_first_step(mirror: Mirror) -> None:
    with mirror.scope():
        model = nn.Sequential(nn.Linear(1, 1))
    mirror.run(lambda: model.training)
    model.append(nn.Linear(1, 1))
    with pytest.raises(FailedPreconditionError, match="parameter 'weight' of module Linear"):
        mirror.run(lambda: model.training)


def test_optimizer_over_parameters_of_others() -> None:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(list(layer.parameters()), lr=1.0)
    with pytest.raises(FailedPreconditionError, match=r"param_groups\[0\] of optimizer SGD was not"):
        Mirror().run(lambda: optimizer.step())


def test_modules_without_tensors_may_come_from_anywhere(mirror: Mirror) -> None:
    activation = nn.ReLU()
    assert mirror.run(lambda: activation(torch.tensor(-1.0)).item()) == [0.0, 0.0]


def test_a_refused_step_changes_nothing(mirror: Mirror, layer: nn.Linear) -> None:
    foreign = nn.Linear(1, 1)
    with pytest.raises(FailedPreconditionError):
        mirror.run(lambda: (layer, foreign))
    assert type(layer.weight) is nn.Parameter
    assert mirror.run(lambda: layer.weight.tolist()) == [[[1.0, 2.0]]] * 2


@pytest.mark.parametrize("after_a_step", [False, True])
def test_deepcopy_inside_is_mirrored(after_a_step: bool, mirror: Mirror) -> None:
    with mirror.scope():
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    if after_a_step:
        mirror.run(lambda: model.training)
    with mirror.scope():
        twin = copy.deepcopy(model)
    mirror.run(lambda: twin[0].weight.data.fill_(5.0).sum())
    assert twin[0].weight.tolist() == [[5.0, 5.0]] * 2
    assert twin[0].weight is not model[0].weight
    assert len(mirror.replicas[0].parameters()) == (8 if after_a_step else 4)


@pytest.mark.parametrize("after_a_step", [False, True])
def test_deepcopy_outside_is_a_plain_snapshot(after_a_step: bool, mirror: Mirror, layer: nn.Linear) -> None:
    if after_a_step:
        mirror.run(lambda: layer.weight.data.add_(1).sum())
    snapshot = copy.deepcopy(layer)
    assert type(snapshot) is nn.Linear
    assert type(snapshot.weight) is nn.Parameter
    assert snapshot.weight.tolist() == [[1.0 + after_a_step, 2.0 + after_a_step]]
    mirror.run(lambda: layer.weight.data.add_(1).sum())
    assert snapshot.weight.tolist() == [[1.0 + after_a_step, 2.0 + after_a_step]]
    with pytest.raises(FailedPreconditionError):
        mirror.run(lambda: snapshot.training)


def test_deepcopy_of_model_and_optimizer_together(mirror: Mirror, layer: nn.Linear) -> None:
    with mirror.scope():
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    mirror.run(lambda: (layer.training, optimizer.param_groups[0]["lr"]))
    with mirror.scope():
        layer2, optimizer2 = copy.deepcopy((layer, optimizer))
    assert optimizer2.param_groups[0]["params"][0] is layer2.weight
    assert mirror.run(lambda: optimizer2.param_groups[0]["params"][0] is layer2.weight) == [True, True]


def test_closed_driver_refuses(mirror: Mirror) -> None:
    mirror.driver.release()
    mirror.driver.release()
    with pytest.raises(FailedPreconditionError, match="TestStrategy must be open"):
        mirror.run(lambda: 1)
    with pytest.raises(FailedPreconditionError, match="must be open"):
        mirror.scope()


def test_deepcopy_of_buffers_alone(mirror: Mirror) -> None:
    with mirror.scope():
        norm = nn.BatchNorm1d(1, affine=False)
    mirror.run(lambda: norm.training)
    with mirror.scope():
        twin = copy.deepcopy(norm)
    assert mirror.run(lambda: twin.training) == [True, True]


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


def test_an_average_made_outside_the_scope_stays_on_the_driver(mirror: Mirror, layer: nn.Linear) -> None:
    average = torch.optim.swa_utils.AveragedModel(layer)
    for _ in range(2):
        mirror.run(lambda: layer.weight.data.add_(1.0).sum())
        average.update_parameters(layer)
    assert next(average.parameters()).tolist() == [[2.5, 3.5]]
    assert layer.weight.tolist() == [[3.0, 4.0]]
    with pytest.raises(FailedPreconditionError, match="'module.weight' of module AveragedModel was not"):
        mirror.run(lambda: average.update_parameters(layer))


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


def test_variables_must_stay_on_the_device_of_their_strategy() -> None:
    model = nn.BatchNorm1d(1, device="meta")
    with pytest.raises(
        FailedPreconditionError, match=r"\(cpu or cuda\); parameter 'weight' of module .* moved to meta"
    ):
        origin().require([model, model.weight])
    with pytest.raises(FailedPreconditionError, match="buffer 'running_mean' of module BatchNorm1d was moved to meta"):
        origin().require([model, model.running_mean])


def test_sharded_embeddings_need_parameter_servers() -> None:
    embedding = ShardedEmbedding(10, 2)
    with pytest.raises(FailedPreconditionError, match=r"Mine has none\. Use rd\.ParameterServerStrategy"):
        origin().require([embedding, embedding.weight])
