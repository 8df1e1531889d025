"""The InputWorker actor: runs stages on blocks. Results are what its calls return, so that the caller owns them."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, final

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.pipelines.executor import StageResult, StageSpec, run_stage
from raydist.pipelines.op import ElementError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from raydist.pipelines.blocks import Block

__all__ = ["InputWorker", "PackedError", "WorkerResult", "unpack_result"]


@final
class PackedError(Exception):
    """Carries a portable error in the place of an element's error."""

    def __init__(self, packed: PortableError) -> None:
        super().__init__(packed)
        self.packed = packed


WorkerResult = StageResult | PortableError
"""A stage's result with packed errors; or the error of the whole block (its function could not be loaded, say)."""


@final
class InputWorker:
    """Runs inside an actor, one block at a time. Stages are kept, and sent once each.

    Args:
        name: The worker's name, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._specs: dict[bytes, StageSpec] = {}

    def hello(self) -> int:
        """The worker's process id."""
        return os.getpid()

    def run(self, digest: bytes, spec: bytes | None, block: Block, starts: tuple[int, ...]) -> WorkerResult:
        """Run the stage known as `digest` (its pickled `spec` comes with the first block) on a block."""
        try:
            if spec is not None:
                self._specs[digest] = pickle.loads(spec)
            return self._pack(run_stage(self._specs[digest], block, starts))
        except BaseException as error:  # SystemExit in a user's function must not end the worker
            return pack_error(error, f"In {self._name}.")

    def forget(self, digests: Sequence[bytes]) -> None:
        """Drop stages that will not be used again."""
        for digest in digests:
            self._specs.pop(digest, None)

    def _pack(self, result: StageResult) -> StageResult:
        items = tuple(
            replace(item, error=PackedError(pack_error(item.error, f"In {self._name}.")))
            if isinstance(item, ElementError)
            else item
            for item in result.items
        )
        return replace(result, items=items, worker=self._name)


def unpack_result(result: WorkerResult) -> StageResult:
    """The result with the users' own errors in it; raises the error of a whole block."""
    if isinstance(result, PortableError):
        raise result.restore()
    items = tuple(
        replace(item, error=item.error.packed.restore())
        if isinstance(item, ElementError) and isinstance(item.error, PackedError)
        else item
        for item in result.items
    )
    return replace(result, items=items)
