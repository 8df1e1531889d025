"""Stochastic dual coordinate ascent: hinge losses, one row after the other."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, final

import numpy as np
import torch

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.ml.classifiers import LinearClassifier, codes_of, hinge, scores_of, signs_of
from raydist.ml.estimator import means, require_number, require_positive, seed_of
from raydist.ml.passes import Rows, State, Totals
from raydist.strategies.functions import get_replica_context


def hinge_sums(power: int, rows: Rows, state: State) -> Totals:
    """Return the sum of the hinge losses."""
    return {"loss": rows.weight @ hinge(scores_of(rows.x, state), codes_of(rows, state), power)}


def ascend(
    x: np.ndarray, signs: np.ndarray, limits: np.ndarray, duals: np.ndarray, point: np.ndarray, order: np.ndarray
) -> np.ndarray:
    """Maximise the dual over each row in turn, in place; return the change of `point` (k, d).

    Args:
        x: Inputs (n, d), multiplied by the root of the number of replicas. These change their rows at the same time,
            each as if the others made the same change (CoCoA+, Ma et al. 2015), so that the changes can be added.
        signs: (n, k).
        limits: (2, n): upper bounds of the duals, and what is added to the square of a row (the squared hinge).
        duals: (n, k), one for each row and score; changed.
        point: (k, d), multiplied by the root of the number of replicas like the inputs.
        order: The order of the rows.
    """
    squares = (x * x).sum(axis=1) + limits[1]
    start, point = point, point.copy()
    for i in order:
        if squares[i] > 0:
            slope = signs[i] * (point @ x[i]) - 1 + limits[1, i] * duals[i]
            new = np.clip(duals[i] - slope / squares[i], 0, limits[0, i])
            point += ((new - duals[i]) * signs[i])[:, None] * x[i]
            duals[i] = new
    change: np.ndarray = point - start
    return change


def epoch(power: int, c: float, iterator: Iterator[Any], state: State, kept: torch.Tensor) -> dict[str, torch.Tensor]:
    """Pass over all batches once on a replica. `kept` holds duals of its rows, and a number to know each row by."""
    context = get_replica_context()
    replicas = context.num_replicas_in_sync
    point = state["point"].numpy().copy()
    rng = np.random.default_rng(state["seed"].tolist())
    done: list[torch.Tensor] = []
    at, same, dual = 0, True, 0.0
    for element in iterator:
        rows = Rows.of(element, torch.device("cpu"))
        marks = rows.x.sum(dim=1) + rows.targets.reshape(-1)
        size = len(marks)
        known = kept[at : at + size] if len(kept) else torch.cat([torch.zeros(size, len(point)), marks[:, None]], dim=1)
        same = same and len(known) == size and bool((known[:, -1] == marks).all())
        duals = known[:, :-1].clone() if same else torch.zeros(size, len(point), dtype=torch.float64)
        x = torch.cat([rows.x, state["one"].expand(size, 1)], dim=1).numpy() * replicas**0.5
        signs = signs_of(codes_of(rows, state), len(point)).numpy()
        weight = c * rows.weight.numpy()
        limits = np.stack([weight, np.zeros(size)])
        if power == 2:
            limits = np.stack([np.where(weight > 0, np.inf, 0), 0.5 / np.where(weight > 0, weight, np.inf)])
        change = ascend(x, signs, limits, duals.numpy(), point * replicas**-0.5, rng.permutation(size))
        # Rows of x are too large by the root of `replicas`, and so is the change.
        point += context.all_reduce("SUM", torch.as_tensor(change * replicas**-0.5)).cpu().numpy()
        dual += float(duals.sum() - (torch.as_tensor(limits[1])[:, None] * duals.square()).sum() / 2)
        done.append(torch.cat([duals, marks[:, None]], dim=1))
        at += size
    kept = torch.cat(done) if done else kept
    return {"kept": kept, "point": torch.as_tensor(point), "same": torch.tensor(same), "dual": torch.tensor(dual)}


@final
@dataclass(eq=False)
class SDCAClassifier(LinearClassifier):
    """A linear support vector machine, fitted by stochastic dual coordinate ascent.

    Minimises C * sum of losses + (||w||^2 + b^2) / 2, one class against the rest: the objective of scikit-learn's
    LinearSVC. Coefficients change with each row, so a few passes are often enough. Beside the model, each replica keeps
    one number for each of its rows and classes. All passes must read the rows in the same order.

    On N replicas the rows of a batch change the coefficients at the same time. The minimum is the same, the way there
    takes more passes.

    Args:
        C: Weight of the losses against the penalty.
        loss: "squared_hinge" or "hinge".
        tol: Stop once the objective is closer to its minimum than this share of it, by the gap to the dual objective.
        max_iter: Limit of the number of passes that change coefficients.
        fit_intercept: False for intercepts of 0.
        random_state: Seed of the order of the rows in a batch; None for a new one.

    Attributes:
        duality_gap_: The last gap, relative to the objective.

    Source: sklearn.svm.LinearSVC; Shalev-Shwartz and Zhang, 2013.

    >>> SDCAClassifier(random_state=0).fit([[0.0], [1.0], [4.0]], [0, 0, 1]).predict([[0.5], [5.0]]).tolist()
    [0, 1]
    """

    C: float = 1.0
    _: KW_ONLY
    loss: Literal["hinge", "squared_hinge"] = "squared_hinge"
    tol: float = 1e-2
    max_iter: int = 1000
    fit_intercept: bool = True
    random_state: int | None = None

    def _fit(self, data: Dataset) -> bool:
        require_positive("max_iter", self.max_iter)
        require_number("C", self.C, above_zero=True)
        if self.loss not in ("hinge", "squared_hinge"):
            raise InvalidArgumentError(f'loss must be "hinge" or "squared_hinge", got {self.loss!r}.')
        reader, power = self._reader(data), 1 if self.loss == "hinge" else 2
        losses, passes = functools.partial(hinge_sums, power), functools.partial(epoch, power, self.C)
        state, seed = self._find_classes(reader), seed_of(self.random_state)
        state["one"] = torch.tensor(float(self.fit_intercept), dtype=torch.float64)
        self.n_features_in_ = len(reader.fold(means)["x"])
        point = self._zeros()
        kept: Any = torch.zeros(0, 1, dtype=torch.float64)  # the result of a pass is sent back to the replica it is of
        for iteration in range(1, self.max_iter + 1):
            start = {**state, "point": point, "seed": torch.tensor([seed, iteration])}
            result, parts = reader.run(passes, start, kept)
            kept = result["kept"]
            if not all(bool(part["same"]) for part in parts):
                raise InvalidArgumentError(
                    "SDCAClassifier needs the same rows in the same order in each pass, but they came in another one. "
                    "Use shuffle(reshuffle_each_iteration=False), or LinearSVC."
                )
            point = parts[0]["point"]
            self.coef_, self.intercept_ = (part.numpy().copy() for part in (point[:, :-1], point[:, -1]))
            self.n_iter_ = np.array([iteration])
            loss = self.C * float(reader.fold(losses, {**state, **self._state()})["loss"])
            norm = float(point.square().sum())
            gap = loss + norm - float(sum(part["dual"] for part in parts))
            self.duality_gap_ = gap / max(loss + norm / 2, 1e-300)
            if self.duality_gap_ <= self.tol:
                return True
        return False
