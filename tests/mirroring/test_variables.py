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
from raydist.mirroring.aggregation import average
from raydist.mirroring.messages import overwrite
from tests.mirroring.in_process import Mirror, linear, rank_of


def sgd_step(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.sub_(1.0)


@pytest.fixture
def trained() -> tuple[Mirror, nn.Linear]:
    """A layer of weights [1, 2], after a step that made them [0, 1] on the replicas."""
    mirror = Mirror()
    layer = linear(mirror)
    mirror.run(sgd_step, layer)
    return mirror, layer


def on_replicas(mirror: Mirror, layer: nn.Linear) -> list[list[list[float]]]:
    return [values.tolist() for values in mirror.run(lambda: layer.weight.detach().clone())]


def test_forward_on_the_driver_uses_fresh_values(trained: tuple[Mirror, nn.Linear]) -> None:
    _, layer = trained
    assert layer(torch.tensor([1.0, 1.0])).tolist() == [1.0]


def test_state_dict_and_save(trained: tuple[Mirror, nn.Linear]) -> None:
    _, layer = trained
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["weight"].tolist() == [[0.0, 1.0]]
    assert type(loaded["weight"]) is torch.Tensor


def test_save_of_the_whole_module(trained: tuple[Mirror, nn.Linear]) -> None:
    _, layer = trained
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is nn.Linear
    assert type(loaded.weight) is nn.Parameter
    assert loaded.weight.tolist() == [[0.0, 1.0]]


def test_detached_alias_reads_fresh_values(mirror: Mirror, layer: nn.Linear) -> None:
    mirror.run(sgd_step, layer)
    alias = layer.weight.detach()
    mirror.run(sgd_step, layer)
    assert alias.tolist() == [[-1.0, 0.0]]


def test_nothing_is_sent_for_an_unchanged_model(trained: tuple[Mirror, nn.Linear]) -> None:
    mirror, layer = trained
    mirror.run(sgd_step, layer)
    assert mirror.bytes_of_last["bundle"] == mirror.bytes_of_last["writes"] == mirror.bytes_of_last["function"] == 0
    assert mirror.link.calls == []


def test_only_the_first_read_sends_a_message(trained: tuple[Mirror, nn.Linear]) -> None:
    mirror, layer = trained
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
    assert model[1].weight.norm() == expected[1]
    assert mirror.link.fetched == [1, 1]


@pytest.mark.parametrize(
    "read",
    [
        lambda model: model.state_dict(),
        lambda model: model(torch.ones(512)),
        lambda model: [each.norm() for each in model.parameters()],
        lambda model: torch.stack([model[0].weight, model[1].weight]),
        lambda model: copy.deepcopy(model),
    ],
)
def test_several_are_fetched_together(large: tuple[Mirror, Any], read: Callable[[Any], Any]) -> None:
    mirror, model = large
    read(model)
    assert all(float(each.detach().norm()) for each in model.parameters())
    assert mirror.link.fetched == [2]


def test_a_tensor_fetched_alone_can_be_written(large: tuple[Mirror, Any]) -> None:
    mirror, model = large
    before = mirror.replicas[0].parameters()[1].detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    assert mirror.run(lambda: model[0].weight.count_nonzero().item()) == [0] * 2
    assert mirror.link.fetched == [1]
    assert torch.equal(model[1].weight, before)


def test_a_written_tensor_is_kept_when_others_are_fetched(large: tuple[Mirror, Any]) -> None:
    mirror, model = large
    with torch.no_grad():
        model[0].weight.fill_(5.0)
    assert model[1].weight.sum() != 0
    assert mirror.link.fetched == [1, 1]
    assert bool((model[0].weight == 5.0).all())
    assert mirror.run(lambda: bool((model[0].weight == 5.0).all())) == [True] * 2


def test_reads_of_a_hundred_small_tensors_are_one_message(mirror: Mirror) -> None:
    with mirror.scope():
        model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    mirror.run(lambda: len(model))
    mirror.link.calls.clear()
    assert len([each.sum().item() for layer in model for each in (layer.weight, layer.bias)]) == 100
    assert mirror.link.calls.count("tensor_images") == 1
    mirror.driver.release()
    assert mirror.link.calls.count("tensor_images") == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda layer: layer.weight.data.fill_(7.0),
        lambda layer: layer.weight.detach().fill_(7.0),
        lambda layer: nn.init.constant_(layer.weight, 7.0),
        lambda layer: layer.weight.data.copy_(torch.full((1, 2), 7.0)),
        lambda layer: layer.weight.detach().numpy().fill(7.0),
        lambda layer: layer.weight.data.numpy().__setitem__(slice(None), 7.0),
        lambda layer: layer.weight.data.view(-1)[:].fill_(7.0),
        lambda layer: layer.load_state_dict({"weight": torch.full((1, 2), 7.0)}),
        lambda layer: setattr(layer.weight, "data", torch.full((1, 2), 7.0)),
        lambda layer: torch.utils.dlpack.from_dlpack(layer.weight.detach()).fill_(7.0),
        lambda layer: nn.utils.vector_to_parameters(torch.full((2,), 7.0), layer.parameters()),
        lambda layer: torch._foreach_copy_([layer.weight.data], [torch.full((1, 2), 7.0)]),
    ],
)
def test_driver_writes_reach_every_replica(trained: tuple[Mirror, nn.Linear], write: Any) -> None:
    mirror, layer = trained
    write(layer)
    assert on_replicas(mirror, layer) == [[[7.0, 7.0]]] * 2
    assert on_replicas(mirror, layer) == [[[7.0, 7.0]]] * 2
    assert mirror.bytes_of_last["writes"] == 0


def test_kept_numpy_view_writes_after_a_step(mirror: Mirror, layer: nn.Linear) -> None:
    mirror.run(sgd_step, layer)
    view = layer.weight.detach().numpy()
    mirror.run(sgd_step, layer)
    view[0, 1] = 50.0  # without a look at the parameter since the step
    assert on_replicas(mirror, layer) == [[[-1.0, 50.0]]] * 2
    assert layer.weight.tolist() == [[-1.0, 50.0]]


def test_view_from_before_the_first_step(mirror: Mirror, layer: nn.Linear) -> None:
    view = layer.weight.detach().numpy()
    mirror.run(sgd_step, layer)
    view[:] = 9.0
    assert on_replicas(mirror, layer) == [[[9.0, 9.0]]] * 2


def test_view_that_only_reads_sends_nothing(trained: tuple[Mirror, nn.Linear]) -> None:
    mirror, layer = trained
    view = layer.weight.detach().numpy()
    mirror.run(sgd_step, layer)
    assert mirror.bytes_of_last["writes"] == 0
    assert layer.weight.tolist() == [[-1.0, 0.0]]
    assert view.tolist() == [[-1.0, 0.0]]


def test_nan_does_not_count_as_a_write(mirror: Mirror, layer: nn.Linear) -> None:
    layer.weight.data.fill_(float("nan"))
    mirror.run(lambda: layer.weight.sum().item())
    view = layer.weight.detach().numpy()
    mirror.run(lambda: layer.weight.sum().item())
    assert mirror.bytes_of_last["writes"] == 0
    assert view.shape == (1, 2)


def test_tied_parameters_stay_tied(mirror: Mirror) -> None:
    with mirror.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
    assert mirror.run(lambda: model[0].weight is model[1].weight) == [True, True]
    assert len(mirror.replicas[0].parameters()) == 3
    assert model[0].weight is model[1].weight


def test_parameter_without_a_module(mirror: Mirror) -> None:
    with mirror.scope():
        bias = nn.Parameter(torch.tensor([1.0]))

    def raise_bias() -> None:
        bias.data += 1.0

    mirror.run(raise_bias)
    assert bias.tolist() == [2.0]


def test_running_statistics_read_as_the_mean(mirror: Mirror) -> None:
    with mirror.scope():
        norm = nn.BatchNorm1d(1, momentum=1.0)
    mirror.run(lambda rank: norm(torch.tensor([[0.0], [4.0]]) + 2 * rank).sum().item(), rank_of(mirror))
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [3.0]
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 1
    mirror.run(lambda: norm.training)
    assert mirror.bytes_of_last["writes"] == 0  # what was read as a mean is not written back


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers(layout: Any, mirror: Mirror) -> None:
    with mirror.scope():
        graph: Any = nn.Linear(2, 2)
        graph.register_buffer("edges", torch.eye(2).to_sparse(layout=layout))
    assert mirror.run(lambda: (graph.edges @ torch.ones(2, 1)).sum().item()) == [2.0, 2.0]
    assert (graph.edges.to_dense() + graph.state_dict()["edges"].to_dense()).sum().item() == 4.0
    mirror.run(lambda: setattr(graph, "edges", (torch.ones(2, 2) * 3).to_sparse(layout=layout)))
    assert graph.edges.layout is layout
    assert graph.edges.to_dense().sum().item() == 12.0
    graph.edges = (torch.ones(2, 2) * 2).to_sparse(layout=layout)
    assert mirror.run(lambda: graph.edges.to_dense().sum().item()) == [8.0, 8.0]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
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


def test_driver_write_to_a_buffer_reaches_all(mirror: Mirror) -> None:
    with mirror.scope():
        norm: Any = nn.BatchNorm1d(1)
    mirror.run(lambda: norm.training)
    norm.running_mean.fill_(5.0)
    norm.num_batches_tracked += 3
    assert mirror.run(lambda: (norm.running_mean.item(), norm.num_batches_tracked.item())) == [(5.0, 3)] * 2


def test_average_keeps_equal_values_exact() -> None:
    value = torch.tensor([0.1], dtype=torch.float64)
    assert torch.equal(average([value, value, value]), value)


def test_requires_grad_both_ways(trained: tuple[Mirror, nn.Linear]) -> None:
    mirror, layer = trained
    layer.weight.requires_grad_(False)
    assert mirror.run(lambda: layer.weight.requires_grad) == [False, False]
    mirror.run(lambda: layer.requires_grad_(True).training)
    assert layer.weight.requires_grad is True
    layer.requires_grad_(False)
    assert mirror.run(lambda: layer.weight.requires_grad) == [False, False]


def test_released_variables_are_plain(trained: tuple[Mirror, nn.Linear]) -> None:
    mirror, layer = trained
    alias = layer.weight.detach()
    mirror.driver.release()
    assert type(layer.weight) is nn.Parameter
    assert "_raydist_record" not in vars(layer.weight)
    assert layer.weight.tolist() == alias.tolist() == [[0.0, 1.0]]


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


@pytest.mark.parametrize(
    "read", [lambda weight: weight.tolist(), copy.deepcopy, lambda weight: weight.detach().clone()]
)
def test_a_parameter_that_was_frozen_and_then_read_is_frozen_in_the_next_step(
    trained: tuple[Mirror, nn.Linear], read: Callable[[torch.Tensor], object]
) -> None:
    mirror, layer = trained
    mirror.run(sgd_step, layer)
    layer.weight.requires_grad_(False)
    read(layer.weight)
    assert mirror.run(lambda: layer.weight.requires_grad) == [False, False]
    layer.weight.requires_grad = True
    read(layer.weight)
    assert mirror.run(lambda: layer.weight.requires_grad) == [True, True]


def _dispatch_within(mirror: Mirror, monkeypatch: pytest.MonkeyPatch, method: str, step: Callable[[], object]) -> None:
    """Have another thread's step dispatched while the driver fetches: once, behind what the replicas answer."""
    call = mirror.link.call

    def call_slowly(rank: int, called: Any, *args: Any) -> Any:
        answered = call(rank, called, *args)
        if called.__name__ == method:
            monkeypatch.undo()
            step()
        return answered

    monkeypatch.setattr(mirror.link, "call", call_slowly)


def test_values_fetched_during_a_dispatched_step_are_fetched_again(
    trained: tuple[Mirror, nn.Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, layer = trained
    _dispatch_within(mirror, monkeypatch, "tensor_images", lambda: mirror.run(sgd_step, layer))
    assert layer.weight.tolist() == [[0.0, 1.0]]  # of before that step
    assert layer.weight.tolist() == [[-1.0, 0.0]]


def test_values_fetched_in_one_thread_are_no_writes_in_another(
    trained: tuple[Mirror, nn.Linear], monkeypatch: pytest.MonkeyPatch
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
