"""Who earns much, who clicks: a wide and a deep model over words by the million.

    python examples/wide_and_deep.py                                   # 200 people of the census
    python examples/wide_and_deep.py --synthetic 200000 --replicas 2   # in the shape of Criteo's clicks
    python examples/wide_and_deep.py --data train.txt                  # Criteo's format, or census-income

Tables of rows (`rd.ShardedEmbedding`) lie on the parameter servers, on all replicas together with `--strategy
mirrored`, or in this process with `--strategy one_device`: a step takes and gives the rows of its words, so that a
table costs what was touched of it, not its size.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from chosen_strategy import make_strategy
from click_data import BUILT_IN, NUM_BUCKETS, made_up_table, read_table
from training_loop import make_parser, total, train

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class WideAndDeep(nn.Module):
    """A linear model of words and numbers, and an MLP over numbers and vectors of the words, added up: logits (n,)."""

    def __init__(self, num_numbers: int, num_words: int, dim: int = 8) -> None:
        super().__init__()
        rows = num_words * NUM_BUCKETS
        self.wide_words = rd.ShardedEmbedding(rows, 1, mode="sum")
        self.wide_numbers = nn.Linear(num_numbers, 1)
        self.words = rd.ShardedEmbedding(rows, dim)
        self.deep = nn.Sequential(
            *(nn.Linear(num_numbers + num_words * dim, 64), nn.ReLU()),
            *(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)),
        )

    def forward(self, numbers: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        wide = self.wide_words(words) + self.wide_numbers(numbers)
        deep = self.deep(torch.cat([numbers, self.words(words).flatten(1)], 1))
        logits: torch.Tensor = (wide + deep)[:, 0]
        return logits


def main() -> None:
    parser = make_parser(__doc__, epochs=8, batch_size=32)
    parser.add_argument("--data", type=Path, default=BUILT_IN, help="a file; default: a part of census-income")
    parser.add_argument("--synthetic", type=int, metavar="ROWS", help="make up so many rows in Criteo's shape")
    parser.set_defaults(strategy="parameter_server")
    args = parser.parse_args()
    table = made_up_table(args.synthetic) if args.synthetic else read_table(args.data)
    order = np.random.default_rng(0).permutation(len(table))[: 100 if args.smoke else None]
    test, known = table.rows(order[::5]), table.rows(np.delete(order, slice(None, None, 5)))

    with make_strategy(args.strategy, args.replicas, args.consistency) as strategy:
        torch.manual_seed(0)
        with strategy.scope():
            model = WideAndDeep(table.numbers.shape[1], table.words.shape[1])
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

        def train_step(batch: Batch) -> torch.Tensor:
            numbers, words, targets = batch
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(numbers, words), targets)
            loss.backward()
            optimizer.step()
            return loss.detach()

        def test_step(batch: Batch) -> torch.Tensor:
            """How many rows are told rightly, and the sum of their losses."""
            numbers, words, targets = batch
            with torch.no_grad():
                logits = model(numbers, words)
                losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
            return torch.stack([((logits > 0) == (targets > 0.5)).sum().float(), losses])

        known_batches = known.batches(args.batch_size, shuffled=True)
        train(strategy, train_step, strategy.distribute_dataset(known_batches), 1 if args.smoke else args.epochs)
        right, loss = total(strategy, test_step, strategy.distribute_dataset(test.batches(args.batch_size))).tolist()
        most = max(test.targets.mean(), 1 - test.targets.mean())
        print(f"test accuracy: {right / len(test):.3f} (of always saying the same: {most:.3f})")
        print(f"test loss: {loss / len(test):.4f}")


if __name__ == "__main__":
    main()
