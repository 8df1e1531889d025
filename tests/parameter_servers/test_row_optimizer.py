from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.row_index import GrowingRows
from raydist.parameter_servers.row_optimizer import (
    LazyUpdate,
    RowAdam,
    RowMemory,
    sparse_gradient,
)


@pytest.mark.parametrize("options", [{}, {"lr": 0.1, "betas": (0.5, 0.8), "eps": 1e-3}, {"maximize": True}])
def test_its_steps_are_sparse_adams(options: dict[str, object]) -> None:
    theirs = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    ours = torch.nn.Parameter(theirs.detach().clone())
    reference = torch.optim.SparseAdam([theirs], **options)  # type: ignore[arg-type]
    optimizer = RowAdam([ours], **{key: value for key, value in reference.param_groups[0].items() if key != "params"})
    for _ in range(10):
        ours.grad = torch.randn(5, 3, dtype=torch.float64)
        theirs.grad = sparse_gradient(ours.grad.clone())
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    for key, value in reference.state[theirs].items():
        torch.testing.assert_close(optimizer.state[ours][key], value, rtol=1e-12, atol=1e-14)


OPTIMIZERS: dict[type[torch.optim.Optimizer], tuple[set[str], set[str]]] = {
    torch.optim.Adadelta: ({"square_avg", "acc_delta"}, {"step"}),
    torch.optim.Adagrad: ({"sum"}, {"step"}),
    torch.optim.Adam: ({"exp_avg", "exp_avg_sq"}, {"step"}),
    torch.optim.AdamW: ({"exp_avg", "exp_avg_sq"}, {"step"}),
    torch.optim.Adamax: ({"exp_avg", "exp_inf"}, {"step"}),
    torch.optim.ASGD: ({"ax"}, {"step", "eta", "mu"}),
    torch.optim.NAdam: ({"exp_avg", "exp_avg_sq"}, {"step", "mu_product"}),
    torch.optim.RAdam: ({"exp_avg", "exp_avg_sq"}, {"step"}),
    torch.optim.RMSprop: ({"square_avg"}, {"step"}),
    torch.optim.Rprop: ({"prev", "step_size"}, {"step"}),
    torch.optim.SGD: (set(), set()),
    torch.optim.SparseAdam: ({"exp_avg", "exp_avg_sq"}, {"step"}),
}


def options_of(kind: type[torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    group = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **options).param_groups[0]  # type: ignore[call-arg]
    return {name: value for name, value in group.items() if name != "params"}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_torchs_optimizers_remember(kind: type[torch.optim.Optimizer]) -> None:
    memory = RowMemory.of(kind, options_of(kind), torch.float64)
    assert (set(memory.rows), set(memory.scalars)) == OPTIMIZERS[kind]
    assert memory.sparse is (kind is torch.optim.SparseAdam)


def test_options_decide() -> None:
    assert set(RowMemory.of(torch.optim.SGD, {"lr": 1.0, "momentum": 0.9}, torch.float32).rows) == {"momentum_buffer"}
    amsgrad = RowMemory.of(torch.optim.Adam, options_of(torch.optim.Adam, amsgrad=True), torch.float32)
    assert "max_exp_avg_sq" in amsgrad.rows


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (torch.optim.LBFGS, {"lr": 1.0}, "closure"),
        (torch.optim.Adafactor, {"lr": 1.0}, "row_var"),
        (torch.optim.Muon, {"lr": 1.0}, "depends on others"),
        (torch.optim.SGD, {"lr": 1.0, "momentum": 0.9, "dampening": 0.5}, "first step is of another kind"),
    ],
)
def test_others_are_refused(kind: type[torch.optim.Optimizer], options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"(?s){kind.__name__} cannot: .*{why}.*SparseAdam"):
        RowMemory.of(kind, options, torch.float32)


class Counting(torch.optim.Optimizer):
    """Fills its state in other ways than torch's do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(seen=0, mean=torch.full_like(parameter, 0.5))
            state.setdefault("largest", torch.zeros_like(parameter))
            state["seen"] += 1
            state["mean"].add_(parameter.grad)


def test_optimizers_of_ones_own() -> None:
    memory = RowMemory.of(Counting, {"lr": 1.0}, torch.float32)
    assert {key: float(first) for key, first in memory.rows.items()} == {"mean": 0.5, "largest": 0}
    assert memory.scalars == {"seen": 0}


def rows(count: int) -> GrowingRows:
    made = GrowingRows(2, torch.float64)
    made.extend(count)
    return made


def test_what_is_remembered_grows_with_the_rows() -> None:
    table = rows(2)
    update = LazyUpdate(table)
    options = {"lr": 1.0, "initial_accumulator_value": 0.5}
    update.apply(torch.tensor([1]), torch.full((1, 2), 2.0, dtype=torch.float64), torch.optim.Adagrad, options)
    table.extend(3)
    held = update.state()
    assert held["rows"]["sum"][:, 0].tolist() == [0.5, 4.5, 0.5]
    assert held["scalars"]["step"] == 1
    assert update.num_bytes == 3 * 16


def test_options_may_change_from_step_to_step() -> None:
    table = rows(1)
    update, one = LazyUpdate(table), torch.ones(1, 2, dtype=torch.float64)
    for lr, momentum in ((1.0, 0.0), (0.5, 0.0), (1.0, 0.9), (1.0, 0.8)):
        update.apply(torch.tensor([0]), one, torch.optim.SGD, {"lr": lr, "momentum": momentum})
    # 1, 0.5, then the buffer: 1 and 0.8 * 1 + 1.
    assert table.values[0].tolist() == [pytest.approx(-(1 + 0.5 + 1 + 1.8))] * 2


def test_state_that_is_not_used_now_has_all_rows_too() -> None:
    table = rows(1)
    update, one = LazyUpdate(table), torch.ones(1, 2, dtype=torch.float64)
    for momentum in (0.9, 0.0):
        update.apply(torch.tensor([0]), one, torch.optim.SGD, {"lr": 1.0, "momentum": momentum})
        table.extend(table.count + 1)
    assert update.state()["rows"]["momentum_buffer"][:, 0].tolist() == [1, 0, 0]


def test_a_step_without_rows_counts() -> None:
    update = LazyUpdate(rows(1))
    for kind in (torch.optim.SparseAdam, torch.optim.Adam):
        update = LazyUpdate(rows(1))
        update.apply(torch.empty(0, dtype=torch.int64), torch.empty(0, 2, dtype=torch.float64), kind, {"lr": 1.0})
        assert update.state()["scalars"]["step"] == 1


def test_gradients_are_not_kept() -> None:
    update = LazyUpdate(rows(1))
    for options in ({"lr": 1.0}, {"lr": 1.0, "momentum": 0.9}):
        gradient = torch.ones(1, 2, dtype=torch.float64)
        dropped = weakref.ref(gradient)
        update.apply(torch.tensor([0]), gradient, torch.optim.SGD, options)
        del gradient
        assert dropped() is None
