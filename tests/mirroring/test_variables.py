"""Parameters and buffers on the driver: fresh when read, and what is written reaches every replica."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raydist.core.errors import FailedPreconditionError
from raydist.core.values import PerReplica
from raydist.mirroring.messages import overwrite
from tests.mirroring.in_process import Mirror, linear


def sgd_step(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.sub_(1.0)


Trained = tuple[Mirror, nn.Linear]


@pytest.fixture
def trained() -> Trained:
    """A layer of weights [1, 2], after a step that made them [0, 1] on the replicas."""
    mirror = Mirror()
    layer = linear(mirror)
    mirror.run(sgd_step, layer)
    return mirror, layer


def on_replicas(mirror: Mirror, layer: nn.Linear) -> list[list[list[float]]]:
    return [values.tolist() for values in mirror.run(lambda: layer.weight.detach().clone())]


def test_everything_on_the_driver_reads_fresh_values(trained: Trained) -> None:
    mirror, layer = trained
    assert layer(torch.tensor([1.0, 1.0])).tolist() == [1.0]
    for saved, weights_only in ((layer.state_dict(), True), (layer, False)):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        weight = loaded["weight"] if weights_only else loaded.weight
        assert weight.tolist() == [[0.0, 1.0]]
        assert type(weight) is (torch.Tensor if weights_only else nn.Parameter)
    assert type(loaded) is nn.Linear
    alias, view = layer.weight.detach(), layer.weight.detach().numpy()
    mirror.run(sgd_step, layer)
    assert mirror.bytes_of_last["writes"] == 0  # who only reads sends nothing
    assert alias.tolist() == layer.weight.tolist() == [[-1.0, 0.0]]
    assert view.tolist() == [[-1.0, 0.0]]


def test_nothing_is_sent_for_an_unchanged_model_and_one_message_for_a_read(trained: Trained) -> None:
    mirror, layer = trained
    mirror.run(sgd_step, layer)
    assert mirror.bytes_of_last["bundle"] == mirror.bytes_of_last["writes"] == mirror.bytes_of_last["function"] == 0
    assert mirror.link.calls == []
    assert layer.weight.shape == (1, 2)
    assert "tensor_images" not in mirror.link.calls
    for _ in range(3):
        layer.weight.sum()
    assert mirror.link.calls.count("tensor_images") == 1


@pytest.fixture
def large() -> tuple[Mirror, Any]:
    """Two layers of 1 MB each, after a step that added 1 to all of their weights."""
    mirror = Mirror()
    with mirror.scope():
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)

    mirror.run(step)
    mirror.link.fetched.clear()
    return mirror, model


def test_one_tensor_is_fetched_alone(large: tuple[Mirror, Any]) -> None:
    mirror, model = large
    expected = [replica.detach().norm() for replica in mirror.replicas[0].parameters()]
    assert model[0].weight.norm() == expected[0]
    assert model[0].weight.norm() == expected[0]
    assert mirror.link.fetched == [1]
    with torch.no_grad():
        model[0].weight.fill_(5.0)
    assert model[1].weight.norm() == expected[1]
    assert mirror.link.fetched == [1, 1]
    assert bool((model[0].weight == 5.0).all())  # what was written is kept when others are fetched
    assert mirror.run(lambda: bool((model[0].weight == 5.0).all())) == [True] * 2


def test_several_are_fetched_together(large: tuple[Mirror, Any]) -> None:
    mirror, model = large
    reads: list[Callable[[], object]] = [
        lambda: model.state_dict(),
        lambda: model(torch.ones(512)),
        lambda: [each.norm() for each in model.parameters()],
        lambda: torch.stack([model[0].weight, model[1].weight]),
        lambda: copy.deepcopy(model),
    ]
    for number, read in enumerate(reads):
        mirror.run(lambda: [each.data.add_(1).sum() for each in model.parameters()] and None)
        mirror.link.fetched.clear()
        read()
        assert all(float(each.detach().norm()) for each in model.parameters())
        assert mirror.link.fetched == [2], number


def test_reads_of_a_hundred_small_tensors_are_one_message(mirror: Mirror) -> None:
    with mirror.scope():
        model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    mirror.run(lambda: len(model))
    mirror.link.calls.clear()
    assert len([each.sum().item() for layer in model for each in (layer.weight, layer.bias)]) == 100
    assert mirror.link.calls.count("tensor_images") == 1
    mirror.driver.release()
    assert mirror.link.calls.count("tensor_images") == 1


def test_driver_writes_reach_every_replica(trained: Trained) -> None:
    mirror, layer = trained

    def full(value: float) -> torch.Tensor:
        return torch.full((1, 2), value)

    writes: list[Callable[[float], object]] = [
        lambda value: layer.weight.data.fill_(value),
        lambda value: layer.weight.detach().fill_(value),
        lambda value: nn.init.constant_(layer.weight, value),
        lambda value: layer.weight.data.copy_(full(value)),
        lambda value: layer.weight.detach().numpy().fill(value),
        lambda value: layer.weight.data.numpy().__setitem__(slice(None), value),
        lambda value: layer.weight.data.view(-1)[:].fill_(value),
        lambda value: layer.load_state_dict({"weight": full(value)}),
        lambda value: setattr(layer.weight, "data", full(value)),
        lambda value: nn.utils.vector_to_parameters(torch.full((2,), value), layer.parameters()),
        lambda value: torch._foreach_copy_([layer.weight.data], [full(value)]),
        lambda value: torch.utils.dlpack.from_dlpack(layer.weight.detach()).fill_(value),
    ]
    for number, write in enumerate(writes):
        value = 7.0 + number
        write(value)
        for _ in range(2):
            assert on_replicas(mirror, layer) == [[[value, value]]] * 2, number
        assert mirror.bytes_of_last["writes"] == 0, number


def test_kept_numpy_views_write_after_a_step(mirror: Mirror, layer: nn.Linear) -> None:
    early = layer.weight.detach().numpy()
    mirror.run(sgd_step, layer)
    early[:] = 9.0
    assert on_replicas(mirror, layer) == [[[9.0, 9.0]]] * 2
    view = layer.weight.detach().numpy()
    mirror.run(sgd_step, layer)
    view[0, 1] = 50.0  # without a look at the parameter since the step
    assert on_replicas(mirror, layer) == [[[8.0, 50.0]]] * 2
    assert layer.weight.tolist() == [[8.0, 50.0]]
    mirror.run(sgd_step, layer)
    view[0, 0] = 9.0
    assert layer.weight.tolist() == [[9.0, 49.0]]
    assert on_replicas(mirror, layer) == [[[9.0, 49.0]]] * 2


def test_nan_does_not_count_as_a_write(mirror: Mirror, layer: nn.Linear) -> None:
    layer.weight.data.fill_(float("nan"))
    mirror.run(lambda: layer.weight.sum().item())
    view = layer.weight.detach().numpy()
    mirror.run(lambda: layer.weight.sum().item())
    assert mirror.bytes_of_last["writes"] == 0
    assert view.shape == (1, 2)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_buffers(mirror: Mirror) -> None:
    for layout in (torch.sparse_coo, torch.sparse_csr):
        with mirror.scope():
            graph: Any = nn.Linear(2, 2)
            graph.register_buffer("edges", torch.eye(2).to_sparse(layout=layout))
        assert mirror.run(lambda graph: (graph.edges @ torch.ones(2, 1)).sum().item(), graph) == [2.0, 2.0]
        assert (graph.edges.to_dense() + graph.state_dict()["edges"].to_dense()).sum().item() == 4.0
        threes = (torch.ones(2, 2) * 3).to_sparse(layout=layout)
        mirror.run(lambda graph, edges: setattr(graph, "edges", edges), graph, threes)
        assert graph.edges.layout is layout
        assert graph.edges.to_dense().sum().item() == 12.0
        graph.edges = (torch.ones(2, 2) * 2).to_sparse(layout=layout)
        assert mirror.run(lambda graph: graph.edges.to_dense().sum().item(), graph) == [8.0, 8.0]


@pytest.mark.parametrize(
    ("norm", "training"), [(nn.BatchNorm1d, True), (nn.BatchNorm1d, False), (nn.InstanceNorm1d, True)]
)
def test_running_statistics_of_a_forward_on_the_driver(norm: Any, training: bool, mirror: Mirror) -> None:
    plain = norm(1, momentum=0.5, track_running_stats=True)
    with mirror.scope():
        layer = norm(1, momentum=0.5, track_running_stats=True)
    rows = [torch.arange(4.0).reshape(2, 1, 2) + 2 * rank for rank in range(2)]
    mirror.run(lambda x: layer(x).sum().item(), PerReplica(rows))
    held = [replica.export_buffers()[0].item() for replica in mirror.replicas]
    assert held[1] > held[0]
    layer.train(training)
    layer(rows[0])
    means = mirror.run(lambda: layer.running_mean.item())
    plain.running_mean.fill_(sum(held) / 2)
    plain(rows[0])
    expected = [plain.running_mean.item()] * 2 if training else held
    assert means == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("read", [lambda weight: weight.tolist(), copy.deepcopy, lambda weight: None])
def test_requires_grad_both_ways(trained: Trained, read: Callable[[torch.Tensor], object]) -> None:
    mirror, layer = trained
    mirror.run(sgd_step, layer)
    layer.weight.requires_grad_(False)
    read(layer.weight)
    assert mirror.run(lambda: layer.weight.requires_grad) == [False, False]
    layer.weight.requires_grad = True
    read(layer.weight)
    assert mirror.run(lambda: layer.weight.requires_grad) == [True, True]
    mirror.run(lambda: layer.requires_grad_(False).training)
    assert layer.weight.requires_grad is False


@pytest.mark.parametrize("after_a_step", [False, True])
def test_a_moved_module_is_named(after_a_step: bool, mirror: Mirror) -> None:
    with mirror.scope():
        model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, affine=False))
    if after_a_step:
        mirror.run(lambda: model.training)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    list(model.children())[1].to("meta")
    with pytest.raises(FailedPreconditionError, match="buffer '1.running_mean' of module Sequential was moved to meta"):
        mirror.run(lambda: model.training)
    model.to("meta")
    with pytest.raises(FailedPreconditionError, match="'(0.weight|1.running_mean)' of .* was moved to meta. Leave"):
        mirror.run(lambda: model.training)
    with mirror.scope():
        model.to_empty(device="cpu").load_state_dict(values)
    assert mirror.run(lambda: next(model.parameters()).item()) == [values["0.weight"].item()] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_module_moved_to_a_gpu_is_named_until_it_is_moved_back(mirror: Mirror, layer: nn.Linear) -> None:
    mirror.run(lambda: layer.training)
    weight = layer.weight
    layer.to("cuda")
    assert layer.weight is weight  # moved in place
    for _ in range(2):
        with pytest.raises(FailedPreconditionError, match=r"\(cpu\); parameter 'weight' of .* was moved to cuda:0"):
            mirror.run(lambda: layer.training)
    layer.to("cpu")
    assert mirror.run(lambda: layer.weight.tolist()) == [[[1.0, 2.0]]] * 2


def test_values_fetched_during_a_dispatched_step_are_fetched_again(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, layer = trained
    mirror.dispatch_within(monkeypatch, "tensor_images", lambda: mirror.run(sgd_step, layer))
    assert layer.weight.tolist() == [[0.0, 1.0]]  # of before that step
    assert layer.weight.tolist() == [[-1.0, 0.0]]


def test_values_fetched_in_one_thread_are_no_writes_in_another(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, layer = trained
    held: Any = layer.weight.detach()  # who shares the memory could write unseen: values are compared
    mirror.run(sgd_step, layer)
    store, used = overwrite, list[int]()
    other = threading.Thread(target=lambda: used.append(len(mirror.driver.prepare(lambda: None).writes)))

    def overwrite_slowly(tensor: torch.Tensor, fresh: torch.Tensor) -> None:
        store(tensor, fresh)
        monkeypatch.undo()
        other.start()
        other.join(0.2)
        assert not used

    monkeypatch.setattr("raydist.mirroring.variables.overwrite", overwrite_slowly)
    assert layer.weight.tolist() == [[-1.0, 0.0]]
    assert held.tolist() == [[-1.0, 0.0]]
    other.join(10)
    assert used == [0]
