from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torchmetrics import MeanSquaredError

import raydist as rd
from raydist.training.precision import forward
from tests.training.toys import compiled


class Spy(nn.Module):
    """Notes the type in which it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        self.seen.add(y.dtype)
        return y


def data() -> rd.Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, 3)).astype(np.float32)
    return rd.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).batch(4)


def test_the_forward_computes_in_bfloat16_wherever_a_model_is_used() -> None:
    net = Spy()
    model = compiled(net, precision="bf16", metrics={"mse": MeanSquaredError()})
    for use in (model.fit, model.evaluate, model.predict):
        net.seen.clear()
        use(data(), verbose=False)
        assert net.seen == {torch.bfloat16}
    assert net.inner.weight.dtype == torch.float32
    assert model.predict(data(), verbose=False).dtype == torch.float32


def test_training_in_bfloat16_is_near_that_in_float32() -> None:
    torch.manual_seed(0)
    losses = []
    start = Spy()
    for precision in (None, "bf16"):
        net = Spy()
        net.load_state_dict(start.state_dict())
        history = compiled(net, precision=precision).fit(data(), epochs=3, verbose=False)
        losses.append(history.history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.05)
    assert losses[0] != losses[1]


def test_outputs_of_any_form_are_widened() -> None:
    class Several(nn.Module):
        def forward(self, x: torch.Tensor) -> list[Any]:
            return [x @ x.T, {"length": torch.tensor(3)}]

    product, rest = forward(Several(), torch.ones(2, 2), "bf16")
    assert product.dtype == torch.float32
    assert rest["length"].dtype == torch.int64
    double = forward(nn.Identity(), torch.ones(2, dtype=torch.float64), "bf16")
    assert double.dtype == torch.float64
