"""Predict what somebody thinks of a film: a vector a user, a vector a film, in MovieLens' formats.

    python examples/matrix_factorisation.py --strategy parameter_server
    python examples/matrix_factorisation.py --data ml-1m/ratings.dat --epochs 10

Gradients of embeddings are sparse: only the rows that a batch names travel.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from chosen_strategy import make_strategy
from training_loop import make_parser, total, train

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Ratings:
    """Who gave which film how many stars; users and films are numbered from 0.

    Attributes:
        users: int64 (n,).
        films: int64 (n,).
        stars: float32 (n,).
    """

    users: np.ndarray
    films: np.ndarray
    stars: np.ndarray

    def __len__(self) -> int:
        return len(self.stars)

    def rows(self, which: np.ndarray) -> Ratings:
        """Some of them."""
        return Ratings(self.users[which], self.films[which], self.stars[which])

    def batches(self, batch_size: int, *, shuffled: bool = False) -> rd.Dataset:
        dataset = rd.Dataset.from_tensor_slices((self.users, self.films, self.stars))
        return (dataset.shuffle(len(self), seed=0) if shuffled else dataset).batch(batch_size)


def read_ratings(file: Path) -> Ratings:
    """`user::film::stars::when` (1M, 10M), tabs (100K), or commas with a line of names (20M and later)."""
    with file.open(newline="", encoding="latin-1") as lines:
        rows = [row for row in _cells(lines) if row[0].isdigit()]
    users, films = (np.unique([int(row[place]) for row in rows], return_inverse=True)[1] for place in (0, 1))
    return Ratings(users, films, np.array([float(row[2]) for row in rows], np.float32))


def _cells(lines: Iterator[str]) -> Iterator[list[str]]:
    for line in lines:
        if "::" in line:
            yield line.rstrip().split("::")
        else:
            yield next(csv.reader([line], delimiter="\t" if "\t" in line else ","))


def made_up_ratings(count: int, num_users: int = 500, num_films: int = 300, rank: int = 4) -> Ratings:
    """Stars of users and films that have tastes; a few films are seen by most."""
    draw = np.random.default_rng(0)
    users = draw.integers(0, num_users, count)
    films = (num_films * draw.random(count) ** 2).astype(np.int64)
    tastes, kinds = draw.normal(size=(num_users, rank)), draw.normal(size=(num_films, rank))
    liked = (tastes[users] * kinds[films]).sum(1) / np.sqrt(rank) + draw.normal(size=count) / 4
    return Ratings(users, films, np.clip(np.round(3.5 + liked), 1, 5).astype(np.float32))


class Factors(nn.Module):
    """Stars: the mean, a bias each, and how well two vectors agree."""

    def __init__(self, num_users: int, num_films: int, mean: float, dim: int) -> None:
        super().__init__()
        self.users, self.films = (nn.Embedding(count, dim, sparse=True) for count in (num_users, num_films))
        self.biases = nn.ModuleList(nn.Embedding(count, 1, sparse=True) for count in (num_users, num_films))
        self.mean = mean
        for embedding in (self.users, self.films, *self.biases):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, users: torch.Tensor, films: torch.Tensor) -> torch.Tensor:
        agreement = (self.users(users) * self.films(films)).sum(1)
        stars: torch.Tensor = self.mean + agreement + self.biases[0](users)[:, 0] + self.biases[1](films)[:, 0]
        return stars


def main() -> None:
    parser = make_parser(__doc__, epochs=8, batch_size=128)
    parser.add_argument("--data", type=Path, help="ratings in a format of MovieLens; default: made up ones")
    parser.add_argument("--dim", type=int, default=8, help="of the vectors")
    args = parser.parse_args()
    ratings = read_ratings(args.data) if args.data else made_up_ratings(1_000 if args.smoke else 30_000)
    order = np.random.default_rng(0).permutation(len(ratings))
    test, known = ratings.rows(order[::10]), ratings.rows(np.delete(order, slice(None, None, 10)))

    with make_strategy(args.strategy, args.replicas, args.consistency) as strategy:
        torch.manual_seed(0)
        with strategy.scope():
            size = int(ratings.users.max()) + 1, int(ratings.films.max()) + 1
            factors = Factors(*size, mean=float(known.stars.mean()), dim=args.dim)
            optimizer = torch.optim.Adagrad(factors.parameters(), lr=0.1)

        def train_step(batch: Batch) -> torch.Tensor:
            users, films, stars = batch
            optimizer.zero_grad()
            loss = F.mse_loss(factors(users, films), stars)
            loss.backward()
            optimizer.step()
            return loss.detach()

        def test_step(batch: Batch) -> torch.Tensor:
            users, films, stars = batch
            with torch.no_grad():
                squares: torch.Tensor = (factors(users, films) - stars).square().sum()
            return squares

        train(
            strategy,
            train_step,
            strategy.distribute_dataset(known.batches(args.batch_size, shuffled=True)),
            1 if args.smoke else args.epochs,
        )
        squares = total(strategy, test_step, strategy.distribute_dataset(test.batches(args.batch_size)))
        of_mean = float(np.square(test.stars - known.stars.mean()).mean())
        print(f"test error: {(float(squares) / len(test)) ** 0.5:.3f} stars (of the mean: {of_mean**0.5:.3f})")


if __name__ == "__main__":
    main()
