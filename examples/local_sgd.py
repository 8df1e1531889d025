"""A strategy of one's own: local SGD. Replicas train by themselves and average their parameters every few batches.

    python examples/local_sgd.py --every 4     # how far it is from averaging gradients
    python examples/local_sgd.py --check       # does it keep what a strategy promises?

Averages cost one exchange every few batches in the place of one a batch, for parameters that are not quite those of one
device. What optimizers remember (momentum) stays with each replica. Between two averages the driver reads those of
replica 0: take a multiple of `every` batches before you read, or save.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import raydist as rd


class AverageEvery(rd.StrategyHooks):
    """Gradients stay where they are; after every few batches parameters become their mean, weighted by rows."""

    exchanges_gradients = False

    def __init__(self, every: int) -> None:
        self.every = every
        self.num_batches = 0
        self.num_rows = 0.0

    def restart(self) -> None:
        self.num_batches, self.num_rows = 0, 0.0

    def after_batch(self, variables: rd.ReplicaVariables) -> None:
        self.num_batches += 1
        self.num_rows += 1 if variables.rows is None else variables.rows[variables.rank]
        if self.num_batches == self.every:
            self.average(variables)
            self.restart()

    def average(self, variables: rd.ReplicaVariables) -> None:
        total = torch.tensor([self.num_rows], dtype=torch.float64)
        variables.all_reduce(total)
        for parameter in variables.parameters():
            parameter.data.mul_(self.num_rows / total.item())
            variables.all_reduce(parameter.data)


class LocalSGD(rd.OneNodeStrategy):
    """One replica per device of one node, each with gradients of its own.

    Args:
        devices: As for `rd.MirroredStrategy`.
        every: After how many batches parameters are averaged.
        options: As for `rd.OneNodeStrategy`.
    """

    def __init__(self, devices: Any = None, *, every: int = 4, **options: Any) -> None:
        super().__init__(devices, **options)
        self.every = every

    def replica_rules(self) -> rd.StrategyHooks:
        return AverageEvery(self.every)


def train(strategy: rd.Strategy, num_epochs: int = 2) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The weights of a linear regression as the driver and as each replica sees them, after 8 batches an epoch."""
    torch.manual_seed(0)
    x = torch.randn(30, 3, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    with strategy.scope():
        model = torch.nn.Linear(3, 1, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        rows, targets = batch
        optimizer.zero_grad()
        (model(rows)[:, 0] - targets).square().mean().backward()
        optimizer.step()

    for _ in range(num_epochs):
        for batch in strategy.distribute_dataset(rd.Dataset.from_tensor_slices((x, y)).batch(4)):
            strategy.run(step, args=(batch,))
    each = strategy.local_results(strategy.run(lambda: model.weight.detach().clone()))
    return model.weight.detach().clone(), list(each)


def main() -> None:
    parser = argparse.ArgumentParser(description="Local SGD, a strategy of one's own.")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--every", type=int, default=4, help="average parameters after so many batches")
    parser.add_argument("--check", action="store_true", help="check what every strategy promises")
    arguments = parser.parse_args()
    if arguments.check:
        from raydist.testing import check_strategy

        check_strategy(lambda: LocalSGD(arguments.replicas, every=arguments.every))
        print("it keeps what a strategy promises")
        return
    alone, _ = train(rd.OneDeviceStrategy("cpu"))
    with LocalSGD(arguments.replicas, every=arguments.every) as strategy:
        averaged, each = train(strategy)
    print(f"replicas apart: {max(float((other - each[0]).abs().max()) for other in each):.1e}")
    print(f"apart from one device: {float((averaged - alone).abs().max()):.1e}")


if __name__ == "__main__":
    main()
