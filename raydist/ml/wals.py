"""Weighted alternating least squares: factors of a sparse matrix of ratings."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, final

import numpy as np
import torch

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.ml.estimator import Regressor, initial_values, require_number, require_positive, seed_of
from raydist.ml.passes import Reader, Rows, State, Totals

MAX_SUMS = 1 << 23
"""Numbers in the sums of a pass (64 MB): more rows are solved in several passes."""


def largest(rows: Rows, _: State) -> Totals:
    """Return the largest row and column numbers of a batch, the largest of their negatives, and of their fractions."""
    pairs = torch.cat([rows.x, -rows.x, rows.x.frac().abs()], dim=1)
    return {"pairs": torch.cat([torch.full_like(pairs[:1], -torch.inf), pairs]).amax(dim=0)}


def larger(a: Totals, b: Totals) -> Totals:
    """Return the larger ones of both."""
    return {"pairs": a["pairs"].maximum(b["pairs"])}


def normal_equations(rows: Rows, state: State) -> Totals:
    """Return the sums of w r^2, (w - w0) v v^T and w r v of the ratings r of each row in a range. v is the factor
    of a column.

    With `side` 1 columns take the place of rows.
    """
    side, start, size = state["range"].tolist()
    own, other = rows.x[:, side].long() - start, rows.x[:, 1 - side].long()
    inside = (own >= 0) & (own < size)
    own, factors = own[inside], state["factors"][other[inside]]
    weight, ratings = rows.weight[inside], rows.targets.reshape(-1)[inside]
    k = factors.shape[1]
    squares = factors[:, :, None] * factors[:, None, :] * (weight - state["unobserved"])[:, None, None]
    return {
        "squares": weight @ ratings.square(),
        "a": torch.zeros(size, k, k, dtype=torch.float64, device=own.device).index_add(0, own, squares),
        "b": torch.zeros(size, k, dtype=torch.float64, device=own.device).index_add(
            0, own, factors * (weight * ratings)[:, None]
        ),
    }


@final
@dataclass(eq=False)
class WALS(Regressor):
    """Weighted alternating least squares: a sparse matrix of ratings as the product of two factors.

    Minimises, with the first sum over the ratings r_ij and the second one over all other places of the matrix,

        sum of w_ij (r_ij - u_i v_j)^2 + w0 * sum of (u_i v_j)^2 + regularization * (|U|^2 + |V|^2).

    `fit` takes one rating a row: X holds pairs (row, column), y the ratings, sample_weight their weights w_ij. With
    w0 = 0 only observed ratings count (stars); with w0 > 0 all others are taken for zeros of little weight (clicks). An
    iteration takes two passes, and more if factors are large.

    Args:
        n_components: The length k of the factor of a row or column.
        regularization: The L2 penalty.
        unobserved_weight: w0.
        max_iter: Limit of the number of iterations.
        tol: Stop once an iteration reduces the loss by less than this share.
        shape: Numbers of rows and columns; None for those of the largest pairs.
        init: Initial factors of the columns (columns, k); None for random ones.
        random_state: Seed of random factors; None for a new one.

    Attributes:
        row_factors_: U (rows, k).
        column_factors_: V (columns, k).
        loss_: The minimised sum.
        n_iter_: The number of iterations.

    Source: Hu, Koren and Volinsky, 2008; tf.contrib.factorization.WALSModel.

    >>> pairs, ratings = [[0, 0], [0, 1], [1, 0], [1, 1]], [1.0, 2.0, 2.0, 4.0]
    >>> model = WALS(1, regularization=0.1, random_state=0).fit(pairs, ratings)
    >>> model.predict([[1, 1]]).round().tolist()
    [4.0]
    """

    n_components: int = 8
    _: KW_ONLY
    regularization: float = 0.1
    unobserved_weight: float = 0.0
    max_iter: int = 100
    tol: float = 1e-3
    shape: tuple[int, int] | None = None
    init: Any = None
    random_state: int | None = None
    _fitted = "column_factors_"

    def _fit(self, data: Dataset) -> bool:
        k = require_positive("n_components", self.n_components)
        require_positive("max_iter", self.max_iter)
        require_number("unobserved_weight", self.unobserved_weight)
        require_number("regularization", self.regularization, above_zero=True)
        reader = self._reader(data)
        num_rows, num_columns = self._shape(reader)
        self.n_features_in_, self.loss_ = 2, math.inf
        if self.init is None:
            draw = np.random.default_rng(seed_of(self.random_state)).normal(size=(num_columns, k))
            columns = torch.as_tensor(draw / k**0.5)
        else:
            columns = initial_values(self.init, num_columns, k)
        for iteration in range(1, self.max_iter + 1):
            self.n_iter_, before = iteration, self.loss_
            rows, _ = self._solve(reader, 0, num_rows, columns)
            columns, least = self._solve(reader, 1, num_columns, rows)
            self.loss_ = least + self.regularization * float(rows.square().sum())
            if converged := before - self.loss_ <= self.tol * self.loss_:
                break
        self.row_factors_, self.column_factors_ = rows.numpy(), columns.numpy()
        return converged

    def _shape(self, reader: Reader) -> tuple[int, int]:
        found = reader.fold(largest, merge=larger)["pairs"].tolist()
        if len(found) != 6:
            raise InvalidArgumentError(f"X must hold pairs (row, column), got rows of {len(found) // 3} numbers.")
        most, least = found[:2], [-number for number in found[2:4]]
        shape = self.shape or (int(most[0]) + 1, int(most[1]) + 1)
        if max(found[4:]) > 0 or min(least) < 0 or most[0] >= shape[0] or most[1] >= shape[1]:
            raise InvalidArgumentError(
                f"Pairs must be whole numbers from (0, 0) below the shape {shape}, got some from {least} to {most}."
            )
        return int(shape[0]), int(shape[1])

    def _solve(self, reader: Reader, side: int, size: int, factors: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the best factors of the rows (side 0) or columns (1), given those of the other side; and the loss."""
        k, w0 = self.n_components, float(self.unobserved_weight)
        everywhere = w0 * factors.T @ factors + self.regularization * torch.eye(k, dtype=torch.float64)
        most = max(1, MAX_SUMS // (k * k))
        found, loss = [], 0.0
        for start in range(0, size, most):
            state = {
                "range": torch.tensor([side, start, min(most, size - start)]),
                "factors": factors,
                "unobserved": torch.tensor(w0, dtype=torch.float64),
            }
            sums = reader.fold(normal_equations, state)
            found.append(torch.linalg.solve(sums["a"] + everywhere, sums["b"]))
            loss += float(sums["squares"] - (found[-1] * sums["b"]).sum())
        return torch.cat(found), loss

    def _state(self) -> State:
        return {"rows": torch.as_tensor(self.row_factors_), "columns": torch.as_tensor(self.column_factors_)}

    @staticmethod
    def _predicted(x: torch.Tensor, state: State) -> torch.Tensor:
        rows, columns = x[:, 0].long(), x[:, 1].long()
        known = (rows >= 0) & (rows < len(state["rows"])) & (columns >= 0) & (columns < len(state["columns"]))
        if not bool(known.all()):
            raise InvalidArgumentError(
                f"Pairs must be in the fitted matrix of {len(state['rows'])} x {len(state['columns'])}, got "
                f"{x[~known][0].tolist()}. Give WALS the whole shape=."
            )
        return (state["rows"][rows] * state["columns"][columns]).sum(dim=1)
