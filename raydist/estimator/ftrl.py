"""`rd.Ftrl`: follow the regularised leader, per coordinate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from raydist.core.errors import InvalidArgumentError


@final
class Ftrl(torch.optim.Optimizer):
    """FTRL-Proximal (McMahan et al. 2013): the update of linear models with many features of which few occur.

    With l1 > 0, weights are exactly 0 until their features have mattered enough.

    Args:
        params: Parameters, or groups of parameters.
        lr: Learning rate, > 0.
        learning_rate_power: How the rate of a coordinate falls with its sum of squared gradients, <= 0.
        initial_accumulator_value: First value of these sums, >= 0.
        l1_regularization_strength: Strength of the L1 penalty, >= 0.
        l2_regularization_strength: Strength of the L2 penalty, >= 0.
        beta: The beta of the paper, >= 0.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = rd.Ftrl([weight], lr=1.0, initial_accumulator_value=0.0)
    >>> weight.grad = torch.tensor([2.0])
    >>> optimizer.step()
    >>> weight.tolist()
    [-1.0]

    Source: tf.keras.optimizers.Ftrl, tf.compat.v1.train.FtrlOptimizer.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        beta: float = 0.0,
    ) -> None:
        strengths = (initial_accumulator_value, l1_regularization_strength, l2_regularization_strength, beta)
        if not lr > 0 or learning_rate_power > 0 or min(strengths) < 0:
            raise InvalidArgumentError(
                "Ftrl needs lr > 0, learning_rate_power <= 0 and other numbers >= 0, got "
                f"{lr!r}, {learning_rate_power!r} and {strengths!r}."
            )
        defaults = {
            "lr": lr,
            "power": learning_rate_power,
            "initial": initial_accumulator_value,
            "l1": l1_regularization_strength,
            "l2": l2_regularization_strength,
            "beta": beta,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update of every parameter that has a gradient.

        Args:
            closure: Computes the loss again and returns it, as for torch's optimizers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        state = self.state[parameter]
        if not state:
            state["accumulator"] = torch.full_like(parameter, group["initial"])
            state["linear"] = torch.zeros_like(parameter)
        accumulator, linear = state["accumulator"], state["linear"]
        before = accumulator.pow(-group["power"])
        accumulator.addcmul_(gradient, gradient)
        after = accumulator.pow(-group["power"])
        linear.add_(gradient).sub_((after - before) / group["lr"] * parameter)
        strength = (after + group["beta"]) / group["lr"] + 2 * group["l2"]
        shrunk = linear.sign() * group["l1"] - linear
        parameter.copy_(torch.where(linear.abs() > group["l1"], shrunk / strength, 0))
