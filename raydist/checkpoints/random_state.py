"""The random generators of this process, so that a resumed run draws what the run would have drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch

from raydist.context.seed_calls import num_seed_calls

__all__ = [
    "REPLICAS",
    "RESTORED_REPLICAS",
    "RestoredReplicas",
    "are_random_states",
    "random_states",
    "set_random_states",
]

REPLICAS = "replicas"
"""What the states of replicas are called among all."""


def random_states() -> dict[str, Any]:
    """Of torch, of its GPUs where any is in use, of Python and of numpy, as a state that `pack_state` takes."""
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
    """Go on as the generators did of which `random_states` gave these; see `are_random_states` for others."""
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
    """Whether generators can be set to them; they are not.

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
    """The random states that replicas are to go on from: what this process restored last.

    Attributes:
        count: How often that was.
        states: Of each replica, as `Share.random` has them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.states: tuple[tuple[bytes, ...], ...] = ()
        self._num_seed_calls = 0

    def restore(self, states: Sequence[Sequence[bytes]]) -> None:
        """Have the replicas of the next step go on from these."""
        self.states = tuple(tuple(bytes(part) for part in each) for each in states)
        self.count += 1
        self._num_seed_calls = num_seed_calls()

    def since(self, count: int) -> tuple[tuple[bytes, ...], ...]:
        """Those that were restored since `count` was this; none where nothing was, or the program has seeded torch."""
        return self.states if count != self.count and num_seed_calls() == self._num_seed_calls else ()


RESTORED_REPLICAS = RestoredReplicas()  # one for the process, as torch's generator is, which it belongs to


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
