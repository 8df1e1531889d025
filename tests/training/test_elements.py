"""Elements, weights of classes, the forward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError

import raydist as rd
from raydist.training.elements import ClassWeights, Example, apply_module, forward, inputs_of, unpack
from tests.training.toys import compiled


class Pair(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        ((1, 2), Example(1, 2, None)),
        ((1, 2, 3), Example(1, 2, 3)),
        (({"a": 1}, (2, 3)), Example({"a": 1}, (2, 3), None)),
        (Pair(1, 2), Example(1, 2, None)),
    ],
)
def test_unpack(element: Any, expected: Example) -> None:
    assert unpack(element) == expected


@pytest.mark.parametrize(
    ("element", "got"),
    [(5, "a single int"), ((1,), "a tuple of 1"), ((1, 2, 3, 4), "a tuple of 4"), ({"x": 1}, "a dict")],
)
def test_unpack_refuses_other_elements(element: Any, got: str) -> None:
    with pytest.raises(rd.SpecError, match=rf"\(x, y\) or \(x, y, sample_weight\), got {got}.* dataset\.map"):
        unpack(element)


@pytest.mark.parametrize(
    ("element", "inputs"), [(5, 5), ((5,), 5), ((5, 6), 5), ((5, 6, 7), 5), ({"a": 5}, {"a": 5}), (((1, 2),), (1, 2))]
)
def test_inputs_of(element: Any, inputs: Any) -> None:
    assert inputs_of(element) == inputs


def test_inputs_of_refuses_longer_tuples() -> None:
    with pytest.raises(rd.SpecError, match="got a tuple of 4"):
        inputs_of((1, 2, 3, 4))


class Echo(nn.Module):
    def forward(self, *args: Any) -> tuple[Any, ...]:
        return args


@pytest.mark.parametrize(
    ("x", "args"), [((1, 2), (1, 2)), ({"a": 1}, ({"a": 1},)), (Pair(1, 2), (Pair(1, 2),)), (torch.ones(()), (1,))]
)
def test_a_plain_tuple_is_unpacked_into_arguments(x: Any, args: tuple[Any, ...]) -> None:
    assert apply_module(Echo(), x) == args


@pytest.mark.parametrize(
    "y",
    [
        torch.tensor([0, 1, 2]),
        torch.tensor([[0.0], [1.0], [2.0]]),
        torch.eye(3),
    ],
)
def test_rows_weigh_by_their_class(y: torch.Tensor) -> None:
    weights = ClassWeights.parse({1: 5.0, 2: 0})
    assert weights.of(y).tolist() == [1.0, 5.0, 0.0]
    example = weights.weigh(Example("x", y))
    assert example.sample_weight.tolist() == [1.0, 5.0, 0.0]


def test_classes_and_weights_may_be_numbers_of_numpy() -> None:
    """As scikit-learn computes them."""
    weights = ClassWeights.parse(dict(zip(np.arange(2), np.array([1.0, 3.0], np.float32), strict=True)))
    assert weights.of(torch.tensor([0, 1])).tolist() == [1.0, 3.0]


def test_without_weights_nothing_is_weighted() -> None:
    example = Example("x", torch.ones(3))
    assert ClassWeights.parse(None).weigh(example) is example


@pytest.mark.parametrize(
    "given", [{}, [1.0, 2.0], {"cat": 1.0}, {-1: 1.0}, {0: -1.0}, {0: float("nan")}, {0: "heavy"}, {0: None}]
)
def test_others_are_refused(given: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="class_weight must"):
        ClassWeights.parse(given)


@pytest.mark.parametrize(("y", "got"), [(torch.ones(2, 2, 2), r"shape \(2, 2, 2\)"), ({"a": torch.ones(2)}, "dict")])
def test_targets_must_be_classes(y: Any, got: str) -> None:
    with pytest.raises(rd.SpecError, match=rf"class_weight needs targets .* got {got}"):
        ClassWeights.parse({0: 2.0}).of(y)


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
