"""Random generators of this process: save and restore their states, so that a resumed run draws the same numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch

from raydist.context.seed_calls import num_seed_calls

REPLICAS = "replicas"
"""Key of the replicas' states in the random states."""


def random_states() -> dict[str, Any]:
    """Return the states of torch (and its GPUs if in use), Python and numpy, in a form that `pack_state` accepts."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": (version, np.asarray(numbers, "<u4").tobytes(), gauss),
    }
    if legacy["bit_generator"] == "MT19937":
        key = np.asarray(legacy["state"]["key"], "<u4").tobytes()
        states["numpy"] = (key, int(legacy["state"]["pos"]), int(legacy["has_gauss"]), float(legacy["gauss"]))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set the generators to the result of `random_states`; check other values with `are_random_states` first."""
    _set_here(states)
    if REPLICAS in states:
        RESTORED_REPLICAS.restore(states[REPLICAS])


def _set_here(states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(np.frombuffer(numbers, "<u4").tolist()), gauss))
    if "numpy" in states:
        key, position, has_gauss, cached = states["numpy"]
        np.random.set_state(("MT19937", np.frombuffer(key, "<u4"), position, has_gauss, cached))
    torch.set_rng_state(_tensor(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.set_rng_state(_tensor(state), device)


def are_random_states(states: Any) -> bool:
    """Return True if generators can be set to `states`. Leaves the generators unchanged.

    >>> are_random_states(random_states()), are_random_states({"torch": b"123"})
    (True, False)
    """
    before = random_states()
    try:
        _set_here(states)
        return all(type(part) is bytes for each in states.get(REPLICAS, ()) for part in each)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError):
        return False
    finally:
        _set_here(before)


@final
class RestoredReplicas:
    """The random states that replicas continue from: those that this process restored last.

    Attributes:
        count: Number of restores.
        states: States of each replica, in the form of `Shard.random`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.states: tuple[tuple[bytes, ...], ...] = ()
        self._num_seed_calls = 0

    def restore(self, states: Sequence[Sequence[bytes]]) -> None:
        """Make the replicas of the next step continue from these states."""
        self.states = tuple(tuple(bytes(part) for part in each) for each in states)
        self.count += 1
        self._num_seed_calls = num_seed_calls()

    def since(self, count: int) -> tuple[tuple[bytes, ...], ...]:
        """Return the states restored since `count`; () if there are none or the program has seeded torch since."""
        return self.states if count != self.count and num_seed_calls() == self._num_seed_calls else ()


RESTORED_REPLICAS = RestoredReplicas()  # one per process, like torch's generator


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
