"""Access from the driver to the rows of an embedding table, by calls to the first replica, after all steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, final

import torch

from raydist.errors import FailedPreconditionError
from raydist.mirroring.calls import MirrorCalls, ReplicaLink

__all__ = ["GoneRows", "MirroredRows"]


@final
class MirroredRows:
    """The rows of one table (a `RowAccess`).

    Args:
        link: Calls methods of the replicas.
        handle: Handle of the parameter that represents the table.
    """

    def __init__(self, link: ReplicaLink, handle: int) -> None:
        self._link = link
        self._handle = handle

    def pull(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._link.call(0, MirrorCalls.pull_rows, self._handle, rows)

    def export_rows(self, weight: torch.Tensor) -> list[dict[str, Any]]:
        return self._link.call(0, MirrorCalls.export_rows, self._handle)

    def import_rows(self, weight: torch.Tensor, states: Sequence[Mapping[str, Any]]) -> None:
        self._link.call(0, MirrorCalls.import_rows, self._handle, states)


@final
class GoneRows:
    """The replacement of `MirroredRows` after the strategy is closed: every call raises, as the rows are gone."""

    def pull(self, weight: torch.Tensor, rows: torch.Tensor) -> NoReturn:
        self._refuse()

    def export_rows(self, weight: torch.Tensor) -> NoReturn:
        self._refuse()

    def import_rows(self, weight: torch.Tensor, states: Sequence[Mapping[str, Any]]) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise FailedPreconditionError(
            "The rows of this embedding lay on parameter servers, and went with them when the strategy was closed. "
            "Save an rd.Checkpoint, or call export_rows(), before close(); restore it in the scope of a new strategy."
        )
