from __future__ import annotations

from typing import Any

import pytest
import torch

from raydist.errors import InvalidArgumentError
from raydist.parameter_servers.rows.row_optimizer import RowMemory, make_optimizer, sparse_gradient

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


def test_first_values_that_are_not_zero() -> None:
    rprop = RowMemory.of(torch.optim.Rprop, options_of(torch.optim.Rprop), torch.float64)
    assert {key: float(first) for key, first in rprop.rows.items()} == {"prev": 0, "step_size": 0.1}


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


def test_options_that_a_constructor_does_not_know_are_kept() -> None:
    group = options_of(torch.optim.AdamW) | {"initial_lr": 3.0}
    made = make_optimizer(torch.optim.AdamW, torch.nn.Parameter(torch.zeros(1)), group)
    assert {name: value for name, value in made.param_groups[0].items() if name != "params"} == group


def test_a_sparse_gradient_of_all_rows() -> None:
    values = torch.randn(3, 2)
    assert torch.equal(sparse_gradient(values).to_dense(), values)


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
