"""A monitored log value, and the decision when the value has improved."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, final

from raydist.core.errors import InvalidArgumentError

Mode = Literal["auto", "min", "max"]
Metrics = Callable[[], Mapping[str, Any]]


@final
class Monitor:
    """A monitor of one logged value and its best.

    Args:
        name: Name of the value in the logs.
        mode: "min" or "max": the better direction; "auto": the direction of the metric of that name.
        min_delta: A change counts as an improvement if it is larger than this, >= 0.
        threshold: Value that the first value must improve on; None: any value does.
        owner: Name of the callback, for messages.

    Attributes:
        best: The best value so far; None before the first.
    """

    def __init__(
        self, name: str, mode: Mode = "auto", min_delta: float = 0.0, threshold: float | None = None, owner: str = ""
    ) -> None:
        if mode not in ("auto", "min", "max"):
            raise InvalidArgumentError(f'mode must be "auto", "min" or "max", got {mode!r}.')
        if not min_delta >= 0:
            raise InvalidArgumentError(f"min_delta must be >= 0, got {min_delta!r}.")
        self.name = name
        self.best = threshold
        self._mode = mode
        self._min_delta = min_delta
        self._threshold = threshold
        self._owner = owner

    def restart(self) -> None:
        """Reset the best value."""
        self.best = self._threshold

    def value(self, logs: Mapping[str, Any], consequence: str = "") -> float | None:
        """Return the value in these logs. If it was not logged, warn, with this consequence, and return None.

        Raises:
            InvalidArgumentError: The value is not a single number.
        """
        if self.name not in logs:
            absent = f"{self._owner} monitors {self.name!r}, which is not among the logs {sorted(logs)}."
            warnings.warn(f"{absent}{consequence}", stacklevel=3)
            return None
        try:
            return float(logs[self.name])
        except (TypeError, ValueError, RuntimeError):
            raise InvalidArgumentError(
                f"{self._owner} must monitor a single number, got {logs[self.name]!r:.80} for {self.name!r}. Log a "
                "number that is made of it, in a callback before."
            ) from None

    def update_best(self, value: float, metrics: Metrics) -> bool:
        """Return True if `value` is better than the best so far, and store it as the best."""
        better = self.improves(value, metrics)
        if better:
            self.best = value
        return better

    def improves(self, value: float, metrics: Metrics, than: float | None = None) -> bool:
        """Return True if `value` is better than `than`, or than the best so far. NaN is never better.

        `metrics` returns the model's metrics by their names in logs; "auto" asks for it.
        """
        reference = self.best if than is None else than
        if math.isnan(value):
            return False
        if reference is None or math.isnan(reference):
            return True
        gain = reference - value if self.direction(metrics) == "min" else value - reference
        return gain > self._min_delta

    def direction(self, metrics: Metrics) -> Literal["min", "max"]:
        """Return the better direction. Raise InvalidArgumentError if it is "auto", and the metric has none."""
        if self._mode != "auto":
            return self._mode
        metric = metrics().get(self.name.removeprefix("val_"))
        if metric is None:  # the loss, or a value logged by a callback
            return "min"
        if metric.higher_is_better is None:
            raise InvalidArgumentError(
                f"{self._owner} must be told which direction of {self.name!r} is better, a {type(metric).__name__} "
                f'does not say. Give mode="max" or mode="min".'
            )
        return "max" if metric.higher_is_better else "min"
