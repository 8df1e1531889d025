"""Linear regression by a QR decomposition of the rows, one batch after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.ml.estimator import Regressor, as_columns, means
from raydist.ml.passes import Rows, State, Totals


def centered(rows: Rows, state: State) -> Totals:
    """Return inputs and targets of a batch side by side, less their means, times the root of the weights."""
    table = torch.cat([rows.x - state["x_mean"], as_columns(rows.targets) - state["y_mean"]], dim=1)
    return {"r": table * rows.weight.sqrt()[:, None]}


def triangular(a: Totals, b: Totals) -> Totals:
    """Return the triangular factor of the rows of both.

    It has the singular values of these rows, where sums of X^T X would have their squares, and half of the digits.
    """
    return {"r": torch.linalg.qr(torch.cat([a["r"], b["r"]]), mode="r").R}


@dataclass(eq=False)
class LinearModel(Regressor):
    """The base class of linear regressions, fitted in two passes: means, then the triangular factor.

    Args:
        fit_intercept: False for b = 0.

    Attributes:
        coef_: Coefficients (d,), or (t, d) if targets are (n, t).
        intercept_: A number, or (t,).
    """

    fit_intercept: bool = field(default=True, kw_only=True)

    def _solve(self, data: Dataset, penalty: Any) -> tuple[np.ndarray, int]:
        """Set the coefficients; return the singular values of the centered inputs, and their rank."""
        reader = self._reader(data)
        sums = reader.fold(means)
        y_sum, keep = sums["y"].reshape(-1), float(self.fit_intercept)
        state = {"x_mean": keep * sums["x"] / sums["n"], "y_mean": keep * y_sum / sums["n"]}
        penalties = torch.as_tensor(require_penalties(penalty, len(y_sum)))
        table = reader.fold(centered, state, triangular)
        d = self.n_features_in_ = len(sums["x"])
        upper = triangular(table, {"r": table["r"][:0]})["r"][:d]  # one batch has not been joined with another
        u, singular, vh = torch.linalg.svd(upper[:, :d], full_matrices=False)
        cutoff = max(float(sums["rows"]), d) * torch.finfo(torch.float64).eps * singular.max()
        kept = torch.where(singular > cutoff, singular, 0.0)[:, None]
        factors = (kept / (kept.square() + penalties)).nan_to_num(nan=0.0)  # the least norm: 0 / 0 counts as 0
        coef = vh.T @ (factors * (u.T @ upper[:, d:]))
        intercept = state["y_mean"] - state["x_mean"] @ coef
        one = sums["y"].ndim == 0
        self.coef_: np.ndarray = coef[:, 0].numpy() if one else coef.T.contiguous().numpy()
        self.intercept_: Any = float(intercept) if one else intercept.numpy()
        return singular.numpy(), int((singular > cutoff).sum())

    def _state(self) -> State:
        coef = torch.as_tensor(self.coef_.T)  # (d,) or (d, t)
        return {"coef": coef, "intercept": torch.as_tensor(self.intercept_, dtype=torch.float64)}

    @staticmethod
    def _predicted(x: torch.Tensor, state: State) -> torch.Tensor:
        return x @ state["coef"] + state["intercept"]


@final
@dataclass(eq=False)
class LinearRegression(LinearModel):
    """Least squares: minimises ||y - X w - b||^2, with the w of the least norm where several do.

    The rows are reduced to a triangular matrix (d + t)^2 by QR decompositions, batch by batch, which is as accurate as
    a decomposition of all rows. Time grows with n d^2.

    Attributes:
        rank_: Rank of the centered inputs.
        singular_: Singular values of the centered inputs.

    Source: sklearn.linear_model.LinearRegression.

    >>> data = rd.Dataset.range(8).map(lambda i: (np.array([i, i * i]), 1.0 + 2 * i + 3 * i * i))
    >>> model = LinearRegression().fit(data.batch(4))
    >>> model.coef_.round(6).tolist(), round(model.intercept_, 6)
    ([2.0, 3.0], 1.0)
    """

    def _fit(self, data: Dataset) -> bool:
        self.singular_, self.rank_ = self._solve(data, 0.0)
        return True


@final
@dataclass(eq=False)
class Ridge(LinearModel):
    """Least squares with an L2 penalty: minimises ||y - X w - b||^2 + alpha ||w||^2.

    Args:
        alpha: The penalty, a number >= 0 or one for each target.

    Source: sklearn.linear_model.Ridge.

    >>> Ridge(alpha=0.5).fit([[0.0], [1.0]], [0.0, 2.0]).coef_.round(6).tolist()
    [1.0]
    """

    alpha: Any = 1.0

    def _fit(self, data: Dataset) -> bool:
        self._solve(data, self.alpha)
        return True


def require_penalties(alpha: Any, num_targets: int) -> np.ndarray:
    """Return the penalty of each target; raise InvalidArgumentError unless alpha is a number or one for each."""
    penalties = np.asarray(alpha, dtype=np.float64)
    if penalties.shape not in ((), (num_targets,)) or not (penalties >= 0).all():
        raise InvalidArgumentError(f"alpha must be a number >= 0, or {num_targets} of them, got {alpha!r}.")
    return np.broadcast_to(penalties, (num_targets,)).copy()
