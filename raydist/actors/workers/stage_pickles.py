"""Stages in the form in which they are sent to workers."""

from __future__ import annotations

import hashlib
from typing import final

from raydist.actors.class_tracking import cloudpickle
from raydist.errors import InvalidArgumentError
from raydist.pipelines.engine.kernel import StageSpec

__all__ = ["StagePickles"]


@final
class StagePickles:
    """Pickles every stage once; the last `most` are kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[int, tuple[StageSpec, bytes, bytes]] = {}

    def get(self, spec: StageSpec) -> tuple[bytes, bytes]:
        """A digest that names the stage, and its pickle.

        Raises:
            InvalidArgumentError: A function cannot be pickled.
        """
        known = self._known.get(id(spec))
        if known is not None and known[0] is spec:
            return known[1], known[2]
        data = _pickle(spec)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if len(self._known) >= self._most:
            self._known.pop(next(iter(self._known)))
        self._known[id(spec)] = (spec, digest, data)
        return digest, data


def _pickle(spec: StageSpec) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(spec)
    except Exception as error:
        labels = ", ".join(kernel.label for kernel in spec.kernels)
        raise InvalidArgumentError(
            f"Functions that run on input workers must be picklable, those of {labels} are not: "
            f"{type(error).__name__}: {error}. Open files, locks and connections inside the function, or set "
            "num_input_workers=0."
        ) from error
    return data
